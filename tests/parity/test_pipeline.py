"""A whole render, from words to audio, against diffusers' AceStepPipeline with the same weights.

Inputs are chosen where both agree: whole seconds from 6 up (below, a render has 128 frames here),
and guidance intervals mirrored, because the pipeline counts from noise to clean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from acestep_engine import config as sizes
from acestep_engine.backends import torch_eager
from acestep_engine.dit import conditions, sample
from acestep_engine.dit.noise import draw
from acestep_engine.models_torch import dit, encoders, fsq, oobleck, qwen3
from acestep_engine.types import DiTSampling, Metadata, Plan
from acestep_engine.vae.level import limit_peak, normalise_peak
from acestep_engine.vae.tiling import decode
from acestep_engine.weights.keymaps import official_names
from acestep_engine.weights.tensors import fold_weight_norm

END = "<|endoftext|>"
ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
VAE: dict[str, Any] = {
    "encoder_hidden_size": 128,  # twice the latent channels
    "decoder_channels": 4,
    "decoder_input_channels": 64,
    "audio_channels": 2,
    "channel_multiples": (1, 1, 2, 2, 2),
    "downsampling_ratios": (2, 4, 4, 6, 10),
}
TEXT = {**ATTENTION, "hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 151_669}
CAPTION = "warm analogue synthesizers over a steady beat, female voice"
PLAN = Plan(
    caption=CAPTION,
    lyrics="[Verse]\nwalking home\n\n[Chorus]\nla la la",
    metadata=Metadata(bpm=96, keyscale="A minor", timesignature="4", language="en"),
    duration=8.0,
)
CODES = tuple(1_597 * i % 64_000 for i in range(40))


def byte_tokenizer() -> Tokenizer:
    """One token a byte and the end token at its real id, appended to every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)} | {END: 151_643}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 151_643)]
    )
    return tokenizer


@dataclass(frozen=True)
class Both:
    """The pipeline, and our backends over the same weights."""

    pipeline: AceStepPipeline
    tokenizer: Tokenizer
    text: torch_eager.TorchTextEncoder
    condition: torch_eager.TorchConditionEncoder
    detokenizer: torch_eager.TorchAudioDetokenizer
    velocity: torch_eager.TorchVelocity
    codec: torch_eager.TorchCodec
    silence_NC: Tensor


def lists(config: dict[str, Any]) -> dict[str, Any]:
    """`config` as a config.json would hold it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}


def tiny_pipeline() -> AceStepPipeline:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), pad_token=END, padding_side="right"
    )
    condition = AceStepConditionEncoder(
        **ATTENTION,
        text_hidden_dim=TEXT["hidden_size"],
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
        sliding_window=16,
    )
    condition.silence_latent.normal_()
    return AceStepPipeline(
        vae=AutoencoderOobleck(**lists(VAE), sampling_rate=48_000).eval(),
        text_encoder=Qwen3Model(Qwen3Config(**TEXT, rope_theta=1e6)).eval(),
        tokenizer=tokenizer,
        transformer=AceStepTransformer1DModel(
            **ATTENTION, num_hidden_layers=3, encoder_hidden_size=32, sliding_window=16
        ).eval(),
        condition_encoder=condition.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        audio_tokenizer=AceStepAudioTokenizer(
            **ATTENTION, fsq_dim=32, num_attention_pooler_hidden_layers=2
        ).eval(),
        audio_token_detokenizer=AceStepAudioTokenDetokenizer(
            **ATTENTION, num_attention_pooler_hidden_layers=2
        ).eval(),
    )


def fill(module: nn.Module, role: str, source: dict[str, Tensor]) -> nn.Module:
    """`module` with the weights of a diffusers state dict."""
    style = "official" if role == "text_encoder" else "diffusers"
    names = official_names(role, style, source)
    state = {official: source[name] for official, name in names.items()}
    for name in [name for name in state if name.endswith(".weight_g")]:
        stem = name.removesuffix("_g")
        state[stem] = fold_weight_norm(state.pop(name), state.pop(f"{stem}_v"))
    module.load_state_dict(state, strict=True)
    return module.eval()


@pytest.fixture(scope="module")
def both() -> Both:
    with torch.random.fork_rng():
        torch.random.manual_seed(21)
        pipeline = tiny_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    tower = sizes.EncoderConfig(**ATTENTION, num_hidden_layers=2, sliding_window=16)
    condition = sizes.ConditionConfig(tower, tower, text_hidden_dim=TEXT["hidden_size"])
    small = sizes.FSQConfig(sizes.EncoderConfig(**ATTENTION, num_hidden_layers=2), fsq_dim=32)
    velocity = sizes.DiTConfig(
        **ATTENTION, num_hidden_layers=3, encoder_hidden_size=32, sliding_window=16
    )
    hints = pipeline.audio_token_detokenizer.state_dict() | {
        name: value
        for name, value in pipeline.audio_tokenizer.state_dict().items()
        if name.startswith("quantizer.project_out.")
    }
    text = qwen3.Qwen3Model(sizes.Qwen3Config(**TEXT))
    place = ("cpu", torch.float32)
    return Both(
        pipeline,
        byte_tokenizer(),
        torch_eager.TorchTextEncoder(
            fill(text, "text_encoder", pipeline.text_encoder.state_dict()), *place
        ),
        torch_eager.TorchConditionEncoder(
            fill(
                encoders.ConditionEncoder(condition),
                "condition_encoder",
                pipeline.condition_encoder.state_dict(),
            ),
            *place,
        ),
        torch_eager.TorchAudioDetokenizer(
            fill(fsq.AudioDetokenizer(small), "audio_detokenizer", hints), *place
        ),
        torch_eager.TorchVelocity(
            fill(dit.DiT(velocity), "dit", pipeline.transformer.state_dict()), *place
        ),
        torch_eager.TorchCodec(
            fill(oobleck.Oobleck(sizes.VAEConfig(**VAE)), "vae", pipeline.vae.state_dict()),
            *place,
        ),
        pipeline.condition_encoder.silence_latent[0],
    )


def ours(both: Both, plan: Plan, codes: tuple[int, ...] | None, sampling: DiTSampling) -> Tensor:
    """Latents (1, T, 64) by our loop."""

    def encode(text: str) -> list[int]:
        return both.tokenizer.encode(text, add_special_tokens=False).ids

    settings = sample.resolve(sampling, "base")
    canvas = conditions.paint(both.detokenizer, codes, plan.whole_seconds, both.silence_NC)
    words = conditions.read(both.text, encode, plan, canvas.instruction)
    given = conditions.build(both.condition, words, canvas, both.silence_NC)
    branches = sample.prepare(both.velocity, given, settings)
    noise = draw(sampling.seed, given.frames)
    return list(sample.denoise(both.velocity, branches, noise, settings))[-1].x_BTC


def theirs(
    both: Both, plan: Plan, codes: tuple[int, ...] | None, sampling: DiTSampling, output: str
) -> Tensor:
    """Latents or finished audio of the pipeline."""
    start, end = sampling.interval
    return both.pipeline(
        prompt=plan.caption,
        lyrics=plan.lyrics,
        audio_duration=plan.duration,
        vocal_language=plan.metadata.language,
        bpm=plan.metadata.bpm,
        keyscale=plan.metadata.keyscale,
        timesignature=plan.metadata.timesignature,
        audio_codes="".join(f"<|audio_code_{code}|>" for code in codes) if codes else None,
        num_inference_steps=sampling.steps,
        shift=sampling.shift,
        guidance_scale=sampling.guidance,
        cfg_interval_start=1 - end,
        cfg_interval_end=1 - start,
        latents=draw(sampling.seed, 200),
        output_type=output,
    ).audios


TURBO = DiTSampling(steps=8, shift=3.0, guidance=1.0, seed=3)
APG = DiTSampling(steps=10, shift=3.0, guidance=7.0, seed=4)
PARTLY = DiTSampling(steps=10, shift=2.0, guidance=5.0, interval=(0.3, 0.88), seed=5)
LONG = Plan(CAPTION * 6, PLAN.lyrics, PLAN.metadata, PLAN.duration)


@pytest.mark.parametrize(
    ("plan", "codes", "sampling"),
    [
        (PLAN, None, TURBO),
        (PLAN, CODES, TURBO),
        (PLAN, None, APG),
        (PLAN, CODES, APG),
        (PLAN, None, PARTLY),
        (LONG, None, TURBO),
    ],
    ids=["turbo", "turbo-codes", "apg", "apg-codes", "apg-interval", "cut-caption"],
)
def test_a_render_equals_that_of_the_pipeline(
    both: Both, plan: Plan, codes: tuple[int, ...] | None, sampling: DiTSampling
) -> None:
    found = ours(both, plan, codes, sampling)
    expected = theirs(both, plan, codes, sampling, "latent")
    assert (found - draw(sampling.seed, 200)).abs().max() > 0.5, "the models must do something"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_words_and_codes_and_guidance_are_all_heard(both: Both) -> None:
    plain = ours(both, PLAN, None, APG)
    other_words = Plan("harsh noise", PLAN.lyrics, PLAN.metadata, PLAN.duration)
    for changed in (
        ours(both, other_words, None, APG),
        ours(both, PLAN, CODES, APG),
        ours(both, PLAN, None, DiTSampling(steps=10, shift=3.0, guidance=1.0, seed=4)),
    ):
        assert (plain - changed).abs().max() > 1e-2


def test_finished_audio_equals_that_of_the_pipeline(both: Both) -> None:
    latents_BCT = ours(both, PLAN, None, TURBO).transpose(1, 2)
    audio = normalise_peak(
        limit_peak(decode(both.codec.decode, latents_BCT, 64, lambda done, total: None)).waveform
    )
    expected = theirs(both, PLAN, None, TURBO, "pt")
    torch.testing.assert_close(audio, expected, atol=1e-4, rtol=0)
