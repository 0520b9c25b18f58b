"""Tiled equals untiled for each of 300 lengths and each tile of 16 to 128 frames, both ways.

A model is given windows and nothing else, so the proof for all 33,900 pairs has three parts:

1. Plans. For every pair: the cores follow one another from the first frame to the last; each keeps
   `overlap` frames of its window between itself and a cut (a side that is no end of the song).
2. Assembly. For every pair, or one of those with the same plan: `decode` and `encode` themselves
   give, bit for bit, what one pass gives, with a filter of integers that reaches as far as the
   overlap and no further. Frames that tiles lose or shift at some lengths would be found here.
3. Reach. For every size of window of those plans (and, since a short song in one pass is a longer
   window, for some up to 280 frames), at the start, inside and at the end of a song: a VAE with
   the real strides, kernels and dilations finds in the window what it finds in the song, up to
   the overlap from a cut; one frame nearer it does not, so less overlap would fail. In float64 to
   1e-12 of the maximum; in float32, which adds its rounding alone, to 1e-6 for every 16th size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acestep_engine.config import VAEConfig
from acestep_engine.models_torch.oobleck import Oobleck, Snake
from acestep_engine.types import HOP
from acestep_engine.vae import tiling
from acestep_engine.vae.tiling import DECODE_OVERLAP, ENCODE_OVERLAP, Tile, plan_tiles

LENGTHS, TILES = range(1, 301), range(16, 129)
OVERLAPS = {"decode": DECODE_OVERLAP, "encode": ENCODE_OVERLAP}
SHORT_HOP = 2  # samples of a frame, where only the assembly is tried

Plan = tuple[Tile, ...]


@cache
def plans(length: int, overlap: int) -> dict[Plan, int]:
    """The plans for all tiles, each with one of the tiles that lead to it."""
    return {tuple(plan_tiles(length, tile, overlap)): tile for tile in TILES}


@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
def test_in_every_plan_each_frame_is_kept_once_and_away_from_the_cuts(overlap: int) -> None:
    for length in LENGTHS:
        for plan in plans(length, overlap):
            assert plan[0].start == 0
            assert plan[-1].stop == length
            assert all(a.stop == b.start for a, b in pairwise(plan))
            for t in plan:
                assert 0 <= t.window_start <= t.start < t.stop <= t.window_stop <= length
                assert t.window_start == 0 or t.trim >= overlap
                assert t.window_stop == length or t.window_stop - t.stop >= overlap


def integers(*shape: int) -> Tensor:
    """Small enough for their products to be summed without rounding in float32."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-8, 9, shape, generator=generator).float()


LATENT_WEIGHTS = integers(2 * DECODE_OVERLAP + 1).numpy()
AUDIO_WEIGHTS = integers((2 * ENCODE_OVERLAP + 1) * SHORT_HOP).numpy()


def filter_latents(latents_BCT: Tensor) -> Tensor:
    """(1, 1, t) to (1, 2, 2 t): samples of a frame depend on 9 frames to either side."""
    frames = latents_BCT.shape[2]
    wide = np.convolve(latents_BCT[0, 0].numpy(), LATENT_WEIGHTS)
    samples = np.outer(wide[DECODE_OVERLAP : DECODE_OVERLAP + frames], (1, 2)).ravel()
    return torch.from_numpy(np.stack((samples, -samples))[None])


def filter_audio(audio_BXS: Tensor) -> Tensor:
    """(1, 1, 2 t) to (1, 1, t): a frame depends on 7 frames to either side."""
    frames, first = audio_BXS.shape[2] // SHORT_HOP, (ENCODE_OVERLAP + 1) * SHORT_HOP - 1
    wide = np.convolve(audio_BXS[0, 0].numpy(), AUDIO_WEIGHTS)
    return torch.from_numpy(wide[None, None, first : first + frames * SHORT_HOP : SHORT_HOP])


@pytest.mark.parametrize(
    ("tiled", "one_pass", "overlap", "samples"),
    [
        (tiling.decode, filter_latents, DECODE_OVERLAP, 1),
        (tiling.encode, filter_audio, ENCODE_OVERLAP, SHORT_HOP),
    ],
    ids=OVERLAPS,
)
def test_every_plan_is_carried_out_to_the_result_of_one_pass(
    monkeypatch: pytest.MonkeyPatch,
    tiled: Callable[..., Tensor],
    one_pass: Callable[[Tensor], Tensor],
    overlap: int,
    samples: int,
) -> None:
    monkeypatch.setattr(tiling, "HOP", SHORT_HOP)
    song = integers(1, 1, LENGTHS[-1] * samples)
    for length in LENGTHS:
        part = song[:, :, : length * samples]
        whole = one_pass(part)
        for tile in plans(length, overlap).values():
            found = tiled(one_pass, part, tile, lambda done, total: None)
            assert torch.equal(found, whole.expand_as(found)), (length, tile)


def windows(overlap: int, every: int) -> Iterator[tuple[int, int]]:
    """(frames, start) in a song of 300 frames, for every so manieth size of window in the plans."""
    tiles = (t for length in LENGTHS for plan in plans(length, overlap) for t in plan[1:])
    sizes = {t.window_stop - t.window_start for t in tiles}
    for size in sorted(sizes | set(range(136, 300, 24))):  # some longer ones, as short songs are
        rest = LENGTHS[-1] - size
        if size % every == 0:
            yield from ((size, 0), (size, rest // 2), (size, rest))


def narrow_vae(dtype: torch.dtype, gain: float) -> Oobleck:
    """The real strides, one channel all the way, weights of one size: so the far ones are felt."""
    vae = Oobleck(VAEConfig(2, 1, 64, 1, (1,) * 5))
    generator = torch.Generator().manual_seed(1)
    for parameter in vae.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1.0
        parameter.data = signs * gain / parameter[0].numel() ** 0.5
    for part in vae.modules():
        if isinstance(part, Snake):
            nn.init.zeros_(part.alpha)
            nn.init.zeros_(part.beta)
    return vae.to(dtype).eval()


def by_frames(vae: Oobleck, op: str, song_TV: Tensor) -> Tensor:
    """Result of one pass over frames of latents or samples, frame by frame: (T, values)."""
    if op == "decode":
        return vae.decode(song_TV.T[None]).view(-1, HOP)
    return vae.encode(song_TV.reshape(1, 1, -1))[0].T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "gain", "limit", "every"),
    [(torch.float64, 1, 1e-12, 1), (torch.float32, 0.5, 1e-6, 16)],
)
@pytest.mark.parametrize(("op", "values"), [("decode", 64), ("encode", HOP)])
@torch.inference_mode()
def test_every_window_gives_what_the_song_gives_up_to_the_overlap(
    op: str, values: int, dtype: torch.dtype, gain: float, limit: float, every: int
) -> None:
    vae, overlap, frames = narrow_vae(dtype, gain), OVERLAPS[op], LENGTHS[-1]
    generator = torch.Generator().manual_seed(7)
    song_TV = torch.randn(frames, values, generator=generator, dtype=torch.float64).to(dtype)
    whole_TV = by_frames(vae, op, song_TV)
    for size, start in windows(overlap, every):
        stop = start + size
        window_TV = by_frames(vae, op, song_TV[start:stop])
        gap_T = (window_TV - whole_TV[start:stop]).abs().amax(1) / whole_TV.abs().max()
        left, right = overlap * (start > 0), size - overlap * (stop < frames)
        assert gap_T[left:right].max() <= limit, (size, start)
        if dtype is torch.float64:
            one_less = torch.cat((gap_T[left - 1 : left], gap_T[right : right + 1]))
            assert (one_less > limit).all(), (size, start)
