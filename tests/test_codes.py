"""Audio codes as material: exact places, exact blends, songs of a batch apart, plain refusals."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from acestep_engine.codes import (
    CODEBOOK,
    LEVELS,
    LONGEST,
    crossfade,
    cut,
    join,
    levels_of,
    mix,
    position_of,
    repeat,
    reverse,
    song_of,
)
from acestep_engine.engine import Engine
from acestep_engine.errors import InvalidRequest
from acestep_engine.types import Codes, DiTSampling, Metadata, ModelSpec, Plan


def songs(*lengths: int, seed: int = 0) -> Codes:
    draw = random.Random(seed)
    return Codes(tuple(tuple(draw.randrange(CODEBOOK) for _ in range(n)) for n in lengths))


def code(*levels: int) -> int:
    return song_of(np.array([levels]))[0]


def test_every_code_survives_the_way_to_levels_and_back() -> None:
    everything = tuple(range(64_000))
    levels_NQ = levels_of(everything)
    assert song_of(levels_NQ) == everything
    assert levels_NQ.min(axis=0).tolist() == [0] * 6
    assert levels_NQ.max(axis=0).tolist() == [7, 7, 7, 4, 4, 4]
    assert len({tuple(row) for row in levels_NQ.tolist()}) == 64_000


def test_known_codes_have_known_levels() -> None:
    known = {0: [0] * 6, 12345: [1, 7, 0, 4, 4, 0], 35847: [7, 0, 0, 0, 4, 2]}
    known |= {40000: [0, 0, 1, 3, 0, 3], 63999: [7, 7, 7, 4, 4, 4]}
    assert levels_of(list(known)).tolist() == list(known.values())


@pytest.mark.parametrize(
    ("seconds", "position"),
    [(0, 0), (0.2, 1), (4.6, 23), (0.3, 2), (0.29, 1), (0.1, 1), (0.09, 0), (600, 3000), (-1, -5)],
)
def test_five_codes_are_a_second(seconds: float, position: int) -> None:
    assert position_of(seconds) == position


def test_a_slice_by_seconds_has_five_codes_a_second() -> None:
    whole = songs(60)
    part = cut(whole, position_of(2.4), position_of(7.0))
    assert part.items == (whole.items[0][12:35],)
    assert cut(whole, 12).items == (whole.items[0][12:],)
    assert cut(whole).items == whole.items


def test_slices_joined_are_the_song() -> None:
    whole = songs(11, 17)
    assert join(cut(whole, 0, 4), cut(whole, 4)).items == whole.items


def test_a_repeated_song_is_the_song_again_and_again() -> None:
    whole = songs(3, 5)
    assert repeat(whole, 1).items == whole.items
    assert repeat(whole, 3) == join(join(whole, whole), whole)


def test_a_reversed_song_ends_with_its_beginning() -> None:
    whole = songs(4, 1)
    assert reverse(whole).items == (whole.items[0][::-1], whole.items[1])
    assert reverse(reverse(whole)).items == whole.items


def test_a_mix_of_none_or_all_is_one_of_the_songs() -> None:
    first, second = songs(500, seed=1), songs(500, seed=2)
    assert mix(first, second, 0) == first
    assert mix(first, second, 1) == second


def test_a_mix_lies_level_by_level_between_the_songs_with_halves_rounded_up() -> None:
    first, second = Codes(((code(0, 7, 1, 0, 4, 2),),)), Codes(((code(7, 0, 2, 1, 0, 2),),))
    expected = {
        0.5: code(4, 4, 2, 1, 2, 2),  # 3.5 3.5 1.5 0.5 2 2
        0.25: code(2, 5, 1, 0, 3, 2),  # 1.75 5.25 1.25 0.25 3 2
        0.1: code(1, 6, 1, 0, 4, 2),  # 0.7 6.3 1.1 0.1 3.6 2
    }
    for ratio, blend in expected.items():
        assert mix(first, second, ratio).items == ((blend,),)


def test_halves_are_halves_whatever_the_arithmetic() -> None:
    for top in range(1, 8):
        low, high = Codes(((code(0, 0, 0, 0, 0, 0),),)), Codes(((code(top, 0, 0, 0, 0, 0),),))
        for half in range(top):
            ratio = (half + 0.5) / top
            assert mix(low, high, ratio).items[0] == (half + 1,)
            assert mix(high, low, ratio).items[0] == (top - half,)


def test_a_song_mixed_with_itself_is_itself_and_the_middle_has_no_order() -> None:
    first, second = songs(300, seed=3), songs(300, seed=4)
    assert mix(first, first, 0.37) == first
    assert mix(first, second, 0.5) == mix(second, first, 0.5)


def test_the_shorter_song_decides_how_long_a_mix_is() -> None:
    first, second = songs(5, seed=1), songs(9, seed=2)
    assert mix(first, second, 1).items == (second.items[0][:5],)
    assert mix(second, first, 0).items == (second.items[0][:5],)


def test_a_cross_fade_goes_over_in_equal_steps() -> None:
    low, high = Codes(((0,) * 8,)), Codes(((code(5, 5, 5, 0, 0, 0),) * 10,))
    faded = levels_of(crossfade(low, high, 2, 6).items[0])
    assert faded[:, 0].tolist() == [0, 0, 1, 2, 3, 4, 5, 5, 5, 5]


def test_outside_the_fade_are_the_songs_themselves() -> None:
    first, second = songs(20, seed=1), songs(26, seed=2)
    (faded,) = crossfade(first, second, 8, 12).items
    assert faded[:8] == first.items[0][:8]
    assert faded[12:] == second.items[0][12:]
    assert crossfade(first, second, 7, 8).items[0][7] == mix(first, second, 0.5).items[0][7]
    assert len(crossfade(first, second).items[0]) == 26
    assert len(crossfade(second, first).items[0]) == 20


def test_songs_meet_song_by_song_and_one_meets_all() -> None:
    many, other, one = songs(6, 6, 6, seed=1), songs(6, 6, 6, seed=2), songs(6, seed=3)
    for work in (join, crossfade, lambda a, b: mix(a, b, 0.3)):
        alone = [
            work(Codes((a,)), Codes((b,))).items[0]
            for a, b in zip(many.items, other.items, strict=True)
        ]
        assert work(many, other).items == tuple(alone)
        assert work(many, one).items == tuple(work(Codes((a,)), one).items[0] for a in many.items)
        assert work(one, many).items == tuple(work(one, Codes((b,))).items[0] for b in many.items)


def test_seeds_do_not_follow_what_they_did_not_make() -> None:
    seeded = Codes(((1, 2),), (7,))
    assert cut(seeded, 0, 1).seeds == ()
    assert join(seeded, seeded).seeds == ()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cut(songs(10), 5, 11), r"codes 5 to 11 \(1 to 2.2 s\).* 10 codes \(2 s\)"),
        (lambda: cut(songs(10), 5, 5), "5 to 5"),
        (lambda: cut(songs(10), 6, 5), "6 to 5"),
        (lambda: cut(songs(10), -1), "-1 to 10"),
        (lambda: cut(songs(10, 4), 5), "song of 4 codes"),
        (lambda: crossfade(songs(10), songs(4), 0, 5), "song of 4 codes"),
        (lambda: position_of(float("nan")), "nan seconds"),
        (lambda: repeat(songs(1), 0), "0 times"),
        (lambda: repeat(songs(1), 1.5), r"1\.5 times"),  # type: ignore[arg-type]
        (lambda: repeat(songs(1), 10**12), "longer than 3000 codes"),
        (lambda: join(songs(LONGEST), songs(1)), "600 s"),
        (lambda: mix(songs(2), songs(2), 1.1), r"ratio is 1\.1"),
        (lambda: mix(songs(2), songs(2), float("nan")), "ratio is nan"),
        (lambda: mix(songs(1, 1), songs(1, 1, 1), 0.5), "2 songs meet 3"),
        (lambda: cut(Codes(())), "no audio codes"),
        (lambda: reverse(Codes(((1,), ()))), "Song 2 has no codes"),
        (lambda: mix(songs(1), Codes(((64_000,),)), 0), "64000.* from 0 to 63999"),
        (lambda: cut(Codes(((-1,),))), "holds -1"),
        (lambda: cut(Codes(((1.5,),))), r"holds 1\.5"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_done_is_told_with_the_values(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        call()


def test_the_levels_are_those_of_the_models() -> None:
    assert LEVELS == (8, 8, 8, 5, 5, 5)
    assert CODEBOOK == 64_000


def test_songs_of_different_codes_render_as_they_do_alone(
    engine: Engine, tiny_model: ModelSpec
) -> None:
    plan = Plan("calm", "", Metadata(duration=2), 2.0)
    both, sampling = mix(songs(10, 10, seed=1), songs(10, seed=2), 0.5), DiTSampling(steps=1)
    batch = engine.render(tiny_model, plan, both, sampling).values
    for song, codes in enumerate(both.items):
        own = DiTSampling(steps=1, seed=song)
        alone = engine.render(tiny_model, plan, Codes((codes,)), own).values
        assert (batch[song] == alone[0]).all()
    assert (batch[0] != batch[1]).any()
