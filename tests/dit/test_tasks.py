"""Tasks: lengths, source and mask of text2music with and without codes."""

from __future__ import annotations

import pytest
import torch

from acestep_engine.dit.tasks import text2music
from acestep_engine.dit.text import INSTRUCTIONS
from acestep_engine.errors import InvalidRequest

SILENCE = torch.randn(600, 64, generator=torch.Generator().manual_seed(0))
HINTS = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(1))


def test_without_codes_the_source_is_silence_from_its_start_and_all_is_generated() -> None:
    canvas = text2music(SILENCE, 10, None)
    assert canvas.instruction == INSTRUCTIONS["text2music"]
    assert canvas.frames == 250
    assert torch.equal(canvas.source_BTC[0], SILENCE[:250])
    assert torch.equal(canvas.mask_BTC, torch.ones(1, 250, 64))


def test_the_context_is_source_then_mask() -> None:
    canvas = text2music(SILENCE, 10, None)
    assert canvas.context_BTC.shape == (1, 250, 128)
    assert torch.equal(canvas.context_BTC[..., :64], canvas.source_BTC)
    assert torch.equal(canvas.context_BTC[..., 64:], canvas.mask_BTC)


@pytest.mark.parametrize("seconds", [1, 3, 5])
def test_short_songs_are_raised_to_128_frames(seconds: int) -> None:
    canvas = text2music(SILENCE, seconds, None)
    assert torch.equal(canvas.source_BTC[0], SILENCE[:128])


def test_codes_alone_set_the_length() -> None:
    canvas = text2music(SILENCE, None, HINTS)
    assert canvas.instruction == INSTRUCTIONS["cover"]
    assert torch.equal(canvas.source_BTC, HINTS)
    assert torch.equal(canvas.mask_BTC, torch.ones(1, 200, 64))


def test_a_longer_request_is_filled_with_silence_from_its_first_frame() -> None:
    canvas = text2music(SILENCE, 20, HINTS)
    assert canvas.frames == 500
    assert torch.equal(canvas.source_BTC[:, :200], HINTS)
    assert torch.equal(canvas.source_BTC[0, 200:], SILENCE[:300])


def test_a_shorter_request_keeps_all_codes() -> None:
    assert text2music(SILENCE, 2, HINTS).frames == 200


def test_few_codes_are_filled_up_to_128_frames() -> None:
    canvas = text2music(SILENCE, None, HINTS[:, :25])
    assert canvas.frames == 128
    assert torch.equal(canvas.source_BTC[0, 25:], SILENCE[:103])


def test_songs_longer_than_the_stored_silence_repeat_it() -> None:
    canvas = text2music(SILENCE[:100], 10, None)
    assert torch.equal(canvas.source_BTC[0, 200:], SILENCE[:50])


def test_a_song_without_length_and_codes_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Set a duration"):
        text2music(SILENCE, None, None)
