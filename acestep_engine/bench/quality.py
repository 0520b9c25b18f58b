"""`bench quality`: what a precision of the language model changes, against float32.

Random weights, the same for every precision, so the scores are flatter than those of a trained
model: top-1 agreement is stricter here, the divergence milder. `scale` of the token table makes
them peaked. Dimension key: B rows · L tokens · M positions · V codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.torch_lm import TorchLanguageModel
from ..lm import sampling as draws
from ..lm.tokenizer import QWEN3, load_tokenizer
from ..models_torch.qwen3 import Qwen3Model
from ..runtime import Runtime, Wish, choose, probe
from ..store import DTYPES
from .lm import SAMPLING, SIZES, precision_of
from .measure import random_model, report

PROMPT, CODES = 100, 150  # tokens
WORDS = """# Caption
warm lo-fi hip hop with a soft piano and vinyl crackle

# Lyric
[Verse]
walking down the river line
"""


def run(size: str, scale: float) -> str:
    """The table and the JSON line for the precisions that this CPU gains by."""
    prompts = _prompts()
    exact = _scores(size, scale, choose(probe(), Wish(device="cpu", precision="fp32")), prompts)
    rows: list[dict[str, Any]] = []
    wishes = [Wish(device="cpu", precision="bf16"), Wish(device="cpu", precision="int8")]
    for runtime in (choose(probe(), wish) for wish in wishes):
        ours = _scores(size, scale, runtime, prompts)
        for name, logits_MV in ours.items():
            top1, divergence = compare(exact[name], logits_MV)
            row = {"precision": precision_of(runtime), "prompt": name, "top1": top1}
            rows.append(row | {"kl": divergence})
    return report(rows, {"size": size, "scale": scale, "rows": rows})


def compare(exact_MV: Tensor, ours_MV: Tensor) -> tuple[float, float]:
    """(share of positions with the same likeliest code, mean KL divergence in nats)."""
    log_p, log_q = exact_MV.log_softmax(-1), ours_MV.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    agree = (exact_MV.argmax(-1) == ours_MV.argmax(-1)).float().mean()
    return float(agree), float(divergence)


def _prompts() -> dict[str, Tensor]:
    """Two rows of tokens each: a prompt of random words or of a song sheet, then random codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(QWEN3.codes, (2, CODES), generator=generator) + QWEN3.first_code
    words = torch.tensor(load_tokenizer().encode(WORDS * 9)[:PROMPT]).expand(2, -1)
    noise = torch.randint(QWEN3.text, (2, PROMPT), generator=generator)
    return {
        name: torch.cat((ids, codes), dim=1)
        for name, ids in (("random", noise), ("structured", words))
    }


@torch.inference_mode()
def _scores(
    size: str, scale: float, runtime: Runtime, prompts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Guided scores of all codes at each position after the prompt, (M, V)."""
    model = random_model(lambda: Qwen3Model(SIZES[size]), torch.bfloat16)
    model.embed_tokens.weight *= scale
    dtype = DTYPES[runtime.precision]
    model = model.to(dtype)
    TorchLanguageModel.finish(model, dtype)
    TorchLanguageModel.pack(model, runtime)
    lm = TorchLanguageModel(model, "cpu", dtype)
    scores = {}
    for name, ids_BL in prompts.items():
        embeds_BLD = model.embed_tokens(ids_BL).to(lm.stream)
        states_BLD = model(embeds_BLD)[:, -CODES:]
        logits = lm.logits(states_BLD.flatten(0, 1).float(), QWEN3.code_ids)
        conditional, unconditional = logits.chunk(2)
        scores[name] = draws.guide(conditional, unconditional, SAMPLING.cfg_scale)
    return scores
