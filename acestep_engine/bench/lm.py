"""`bench lm`: tokens a second of the codes phase with CFG, against transformers in the same run.

Two regimes matter: few rows, where a step costs the reading of all weights once (the bound is bytes
over bandwidth), and long songs, where reading the cache grows with every code.
Dimension key: B rows · D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends.torch_eager import TorchLanguageModel
from ..config import Qwen3Config
from ..lm import sampling as draws
from ..lm.tokenizer import QWEN3
from ..models_torch.packed import nbytes
from ..models_torch.qwen3 import Qwen3Model
from ..runtime import Runtime, Wish, choose, probe
from ..store import DTYPES
from ..types import LMSampling
from .measure import bandwidth, interleave, median, no_peer, random_model, report

SIZES = {
    "0.6B": Qwen3Config(hidden_size=1024, intermediate_size=3072),
    "1.7B": Qwen3Config(),
    "tiny": Qwen3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16),
}
SAMPLING = LMSampling()
UNIFORM = 0.37  # which candidate is drawn does not matter for the time


def run(size: str, precision: str, contexts: tuple[int, ...], turns: int, peer: bool) -> str:
    """The table and the JSON line; `contexts` are tokens in the cache before the timed steps."""
    runtime = _runtime(precision)
    device, dtype = torch.device(runtime.device), DTYPES[runtime.precision]
    model = random_model(lambda: Qwen3Model(SIZES[size]), dtype).to(device)
    theirs = _transformers(model, SIZES[size], device) if peer else None
    TorchLanguageModel.finish(model, dtype)  # after the peer has taken the plain weights
    TorchLanguageModel.pack(model, runtime)
    lm = TorchLanguageModel(model, device, dtype)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        calls = {"ours": step_of(lm, context, turns, songs=1)}
        if theirs is not None:
            calls["transformers"] = theirs(context, turns)
        seconds = {name: median(times) for name, times in interleave(turns, calls).items()}
        row: dict[str, Any] = {"context": context, "ours_tok_s": 1 / seconds["ours"]}
        if theirs is not None:
            row["transformers_tok_s"] = 1 / seconds["transformers"]
            row["ratio"] = seconds["transformers"] / seconds["ours"]
        rows.append(row)
    return report(rows, _result(size, precision_of(runtime), lm, rows, turns))


def _runtime(precision: str) -> Runtime:
    """The device that runs torch best; MLX has no part in this benchmark."""
    info = probe()
    kinds = [kind for kind in (info.kind, *info.available) if kind != "mlx"]
    return choose(info, Wish(device=kinds[0], precision=precision))  # pyright: ignore[reportArgumentType]


def precision_of(runtime: Runtime) -> str:
    """The name of what is measured: of the packed weights where there are any."""
    return f"int{runtime.bits}" if runtime.bits else runtime.precision


def step_of(lm: TorchLanguageModel, context: int, turns: int, songs: int) -> Callable[[], Tensor]:
    """A decode step with CFG for `songs` songs: body, head over the codes, guidance, draw."""
    with torch.inference_mode():
        session = lm.open(2 * songs, context + turns + 2)
        session.feed([[row + 5] * context for row in range(2 * songs)])
    ids_BL = torch.full((2 * songs, 1), QWEN3.first_code, device=lm.device)

    @torch.inference_mode()
    def step() -> Tensor:
        logits_BV = lm.logits(session.feed(ids_BL), QWEN3.code_ids)
        return choose_codes(logits_BV)

    return step


def choose_codes(logits_BV: Tensor) -> Tensor:
    """Guidance and draw as in the loop, for all songs."""
    conditional, unconditional = logits_BV.chunk(2)
    guided = draws.guide(conditional, unconditional, SAMPLING.cfg_scale)
    return draws.draw(guided, torch.tensor(UNIFORM, device=logits_BV.device), SAMPLING)


def _result(
    size: str, precision: str, lm: TorchLanguageModel, rows: list[dict[str, Any]], turns: int
) -> dict[str, Any]:
    """The JSON line: the first context counts for the rate, 100 and 3,000 for the growth."""
    read = bandwidth(device=lm.device)
    bound = read / weight_bytes(lm)
    logits_BV = torch.randn(2, QWEN3.codes, generator=torch.Generator().manual_seed(0))
    calls = {
        "short": step_of(lm, 100, turns, 1),
        "long": step_of(lm, 3_000, turns, 1),
        "four": step_of(lm, 100, turns, 4),
        "sampling": lambda: choose_codes(logits_BV.to(lm.device)),
    }
    seconds = {name: median(times) for name, times in interleave(turns, calls).items()}
    first = rows[0]
    return {
        "size": size,
        "precision": precision,
        "tok_s": first["ours_tok_s"],
        "peer": "transformers static cache, full head",
        "peer_tok_s": first.get("transformers_tok_s"),
        "ratio": first.get("ratio"),
        "bandwidth_gb_s": read / 1e9,
        "bound_tok_s": bound,
        "bound_share": first["ours_tok_s"] / bound,
        "growth_3000_over_100": seconds["long"] / seconds["short"],
        "sampling_share": seconds["sampling"] / seconds["short"],
        "batch4_ratio": 4 * seconds["short"] / seconds["four"],
    }


def weight_bytes(lm: TorchLanguageModel) -> int:
    """What a step must read: all layers, and the rows of the head that score codes."""
    width = lm.module.config.hidden_size
    lm.logits(torch.zeros(2, width, device=lm.device), QWEN3.code_ids)
    head = lm.module.head(QWEN3.code_ids)  # there is one if it is packed
    plain = QWEN3.codes * width * lm.dtype.itemsize
    return nbytes(lm.module.layers) + (nbytes(head) if head else plain)


def _transformers(
    model: Qwen3Model, config: Qwen3Config, device: torch.device
) -> Callable[[int, int], Callable[[], Tensor]]:
    """The same weights in transformers: static cache, all rows of the head, its own filters."""
    try:
        import transformers
        from transformers import Qwen3ForCausalLM, StaticCache
    except ImportError as error:
        raise no_peer("transformers") from error
    sizes = {name: getattr(config, name) for name in config.__slots__ if name != "rope_theta"}
    parameters = {"rope_theta": config.rope_theta, "rope_type": "default"}
    theirs = transformers.Qwen3Config(
        **sizes, rope_parameters=parameters, tie_word_embeddings=True, attention_bias=False
    )
    with torch.device("meta"):
        peer = Qwen3ForCausalLM(theirs)
    peer.model.load_state_dict(model.state_dict(), assign=True)
    peer.tie_weights()
    peer.model.rotary_emb = type(peer.model.rotary_emb)(theirs).to(device)
    peer.eval()
    warpers = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(SAMPLING.temperature),
            transformers.TopPLogitsWarper(SAMPLING.top_p),
        ]
    )

    def prepare(context: int, turns: int) -> Callable[[], Tensor]:
        cache = StaticCache(config=theirs, max_cache_len=context + turns + 2)
        prompt = torch.tensor([[5] * context, [6] * context], device=device)
        generator = torch.Generator(device).manual_seed(0)
        ids_BL = torch.full((2, 1), QWEN3.first_code, device=device)
        with torch.inference_mode():
            peer(prompt, past_key_values=cache, logits_to_keep=1)

        @torch.inference_mode()
        def step() -> Tensor:
            out = peer(ids_BL, past_key_values=cache)
            conditional, unconditional = out.logits[:, -1].float().chunk(2)
            guided = draws.guide(conditional, unconditional, SAMPLING.cfg_scale)
            guided[:, : QWEN3.first_code] = -torch.inf
            guided[:, QWEN3.first_code + QWEN3.codes :] = -torch.inf
            scores = warpers(ids_BL[:1], guided)  # pyright: ignore[reportArgumentType]
            weights = scores.softmax(-1)
            return torch.multinomial(weights, 1, generator=generator)

        return step

    return prepare
