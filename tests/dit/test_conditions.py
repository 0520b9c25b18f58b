"""Conditions from real models of tiny size: lengths, order of the parts, codes and references."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from acestep_engine.backends.torch_eager import (
    TorchAudioDetokenizer,
    TorchConditionEncoder,
    TorchTextEncoder,
)
from acestep_engine.config import ConditionConfig, EncoderConfig, FSQConfig, Qwen3Config
from acestep_engine.dit import conditions
from acestep_engine.dit.text import INSTRUCTIONS, lyric_ids, text_ids
from acestep_engine.errors import InvalidRequest
from acestep_engine.lm.tokenizer import load_tokenizer
from acestep_engine.models_torch.encoders import ConditionEncoder
from acestep_engine.models_torch.fsq import AudioDetokenizer
from acestep_engine.models_torch.qwen3 import Qwen3Model
from acestep_engine.types import Metadata, Plan

TOWER = EncoderConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    sliding_window=4,
)
PLAN = Plan(
    caption="slow strings",
    lyrics="[Verse]\nla la",
    metadata=Metadata(bpm=70),
    duration=19.4,
)
SILENCE = torch.randn(900, 64, generator=torch.Generator().manual_seed(4))
CODES = tuple(range(0, 40 * 1500, 1500))  # 40 of them: 8 s


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.detach().normal_(0.0, 0.2, generator=generator)
    return module.eval()


@dataclass(frozen=True)
class Models:
    text: TorchTextEncoder
    condition: TorchConditionEncoder
    detokenizer: TorchAudioDetokenizer


@pytest.fixture(scope="module")
def models() -> Models:
    text = Qwen3Model(
        Qwen3Config(
            vocab_size=151_669,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    condition = ConditionEncoder(ConditionConfig(lyric=TOWER, timbre=TOWER, text_hidden_dim=16))
    detokenizer = AudioDetokenizer(FSQConfig(tower=TOWER, fsq_dim=32))
    place = ("cpu", torch.float32)
    return Models(
        TorchTextEncoder(randomised(text), *place),
        TorchConditionEncoder(randomised(condition), *place),
        TorchAudioDetokenizer(randomised(detokenizer), *place),
    )


def words_of(models: Models, instruction: str = "text2music") -> conditions.Words:
    return conditions.read(models.text, load_tokenizer().encode, PLAN, INSTRUCTIONS[instruction])


def test_words_are_states_of_the_prompt_and_table_rows_of_the_lyrics(models: Models) -> None:
    encode = load_tokenizer().encode
    words = words_of(models)
    text = torch.tensor([text_ids(encode, PLAN, INSTRUCTIONS["text2music"])])
    lyric = torch.tensor([lyric_ids(encode, PLAN)])
    assert torch.equal(words.text_BLD, models.text.states(text))
    assert torch.equal(words.lyric_BLD, models.text.embed(lyric))


def test_real_token_ids_end_as_the_protocol_says() -> None:
    encode = load_tokenizer().encode
    assert text_ids(encode, PLAN, INSTRUCTIONS["cover"])[-3:] == [151_643, 198, 151_643]
    assert lyric_ids(encode, PLAN)[-2:] == [151_643, 151_643]


def test_the_sequence_holds_lyrics_one_timbre_vector_and_text(models: Models) -> None:
    words = words_of(models)
    canvas = conditions.paint(None, None, PLAN.whole_seconds, SILENCE)
    built = conditions.build(models.condition, words, canvas, SILENCE)
    length = words.lyric_BLD.shape[1] + 1 + words.text_BLD.shape[1]
    assert built.encoder_BLD.shape == (1, length, TOWER.hidden_size)
    assert built.null_BLD.shape == (1, 1, TOWER.hidden_size)
    assert built.frames == 500
    assert built.context_BTC.shape == (1, 500, 128)


def test_without_a_reference_750_frames_of_silence_are_heard(models: Models) -> None:
    words, canvas = words_of(models), conditions.paint(None, None, 20, SILENCE)
    silent = conditions.build(models.condition, words, canvas, SILENCE)
    given = conditions.build(models.condition, words, canvas, SILENCE, SILENCE[None, :750])
    other = conditions.build(models.condition, words, canvas, SILENCE, 3 * SILENCE[None, :750])
    assert torch.equal(silent.encoder_BLD, given.encoder_BLD)
    place = words.lyric_BLD.shape[1]
    assert not torch.equal(silent.encoder_BLD[:, place], other.encoder_BLD[:, place])


def test_codes_become_hints_and_change_the_instruction(models: Models) -> None:
    canvas = conditions.paint(models.detokenizer, CODES, None, SILENCE)
    assert canvas.instruction == INSTRUCTIONS["cover"]
    assert canvas.frames == 200
    hints = models.detokenizer.detokenize(torch.tensor([CODES]))
    assert torch.equal(canvas.source_BTC, hints)


def test_a_longer_request_keeps_the_hints_bit_for_bit(models: Models) -> None:
    own_length = conditions.paint(models.detokenizer, CODES, None, SILENCE)
    filled = conditions.paint(models.detokenizer, CODES, 20, SILENCE)
    assert filled.frames == 500
    assert torch.equal(filled.source_BTC[:, :200], own_length.source_BTC)
    assert torch.equal(filled.source_BTC[0, 200:], SILENCE[:300])


def test_without_codes_no_detokenizer_is_needed_but_with_codes_it_is() -> None:
    assert conditions.paint(None, None, 10, SILENCE).instruction == INSTRUCTIONS["text2music"]
    with pytest.raises(InvalidRequest, match=r"40 codes.*no detokenizer"):
        conditions.paint(None, CODES, 10, SILENCE)


def test_an_empty_list_of_codes_is_refused(models: Models) -> None:
    with pytest.raises(InvalidRequest, match="empty list of codes"):
        conditions.paint(models.detokenizer, (), 10, SILENCE)


def test_nothing_in_the_conditions_is_random(models: Models) -> None:
    def once() -> tuple[Tensor, Tensor]:
        canvas = conditions.paint(models.detokenizer, CODES, 20, SILENCE)
        built = conditions.build(models.condition, words_of(models), canvas, SILENCE)
        return built.encoder_BLD, built.context_BTC

    before = torch.get_rng_state()
    first, second = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(math.isfinite(x.sum().item()) for x in first)


@pytest.mark.parametrize("frames", [1, 100, 750])
def test_a_short_timbre_reference_is_repeated_to_thirty_seconds(frames: int) -> None:
    clip = torch.arange(frames, dtype=torch.float32)[None, :, None].expand(1, -1, 64)
    found = conditions.reference(clip)
    assert found.shape == (1, 750, 64)
    assert torch.equal(found[0, :, 0], torch.arange(750.0) % frames)


def test_a_long_timbre_reference_gives_front_middle_and_end() -> None:
    clip = torch.arange(2_000, dtype=torch.float32)[None, :, None].expand(2, -1, 64)
    found = conditions.reference(clip)[1, :, 5]
    windows = [torch.arange(float(start), start + 250) for start in (0, 875, 1_750)]
    assert torch.equal(found, torch.cat(windows))
