"""Prompts of the diffusion half: exact strings, end tokens, truncation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diffusers import AceStepPipeline

from acestep_engine.dit.text import (
    END,
    INSTRUCTIONS,
    LYRIC_TOKENS,
    TEXT_TOKENS,
    lyric_ids,
    lyric_prompt,
    text_ids,
    text_prompt,
)
from acestep_engine.types import Metadata, Plan

FULL = Plan(
    caption="a calm piano",
    lyrics="[Verse]\nla la\n",
    metadata=Metadata(bpm=92, keyscale="F# minor", timesignature="3", language="ja", duration=43),
    duration=42.1,
)
BARE = Plan(caption="a", lyrics="b", metadata=Metadata(bpm=120), duration=30.0)


def encode(text: str) -> list[int]:
    """One token a byte: enough to see where the protocol puts its end tokens."""
    return list(text.encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_the_text_prompt_without_codes_is_exact() -> None:
    assert text_prompt(BARE, INSTRUCTIONS["text2music"]) == (
        "# Instruction\n"
        "Fill the audio semantic mask based on the given conditions:\n"
        "\n"
        "# Caption\n"
        "a\n"
        "\n"
        "# Metas\n"
        "- bpm: 120\n"
        "- timesignature: N/A\n"
        "- keyscale: N/A\n"
        "- duration: 30 seconds\n"
    )


def test_codes_change_the_instruction_only() -> None:
    with_codes = text_prompt(BARE, INSTRUCTIONS["cover"])
    assert with_codes.splitlines()[1] == (
        "Generate audio semantic tokens based on the given conditions:"
    )
    without = text_prompt(BARE, INSTRUCTIONS["text2music"])
    assert with_codes.splitlines()[2:] == without.splitlines()[2:]


def test_the_lyric_prompt_is_exact() -> None:
    assert lyric_prompt(FULL) == "# Languages\nja\n\n# Lyric\n[Verse]\nla la\n"
    assert lyric_prompt(BARE) == "# Languages\nunknown\n\n# Lyric\nb"


@pytest.mark.parametrize("task", ["text2music", "cover"])
@pytest.mark.parametrize("plan", [FULL, BARE], ids=["full", "bare"])
def test_both_prompts_equal_those_of_diffusers(plan: Plan, task: str) -> None:
    text, lyric = AceStepPipeline._format_prompt(
        AceStepPipeline,  # only its static methods are used
        plan.caption,
        plan.lyrics,
        plan.metadata.language or "unknown",
        audio_duration=plan.whole_seconds,
        instruction=AceStepPipeline._get_task_instruction(task),
        bpm=plan.metadata.bpm,
        keyscale=plan.metadata.keyscale,
        timesignature=plan.metadata.timesignature,
    )
    assert text_prompt(plan, INSTRUCTIONS[task]) + "<|endoftext|>\n" == text
    assert lyric_prompt(plan) + "<|endoftext|>" == lyric


def test_the_rewritten_caption_is_read_and_whole_seconds_round_up() -> None:
    plan = replace(FULL, metadata=replace(FULL.metadata, caption="a rewritten one"))
    prompt = text_prompt(plan, INSTRUCTIONS["text2music"])
    assert "# Caption\na rewritten one\n\n" in prompt
    assert "- duration: 43 seconds\n" in prompt


def test_a_missing_colon_is_added_and_a_present_one_kept() -> None:
    assert text_prompt(BARE, "Do it") == text_prompt(BARE, "Do it:")


def test_of_a_pasted_prompt_only_the_caption_is_used() -> None:
    pasted = text_prompt(replace(BARE, caption=" the real one "), "Do it:")
    assert "# Caption\nthe real one\n\n" in text_prompt(replace(BARE, caption=pasted), "Do it:")


def test_a_plain_caption_is_not_stripped() -> None:
    assert "# Caption\n a \n\n\n" in text_prompt(replace(BARE, caption=" a \n"), "Do it:")


def test_end_tokens_stand_where_the_protocol_has_them() -> None:
    text = text_ids(encode, BARE, INSTRUCTIONS["text2music"])
    assert text[-3:] == [END, ord("\n"), END]
    assert decode(text[:-3]) == text_prompt(BARE, INSTRUCTIONS["text2music"])
    lyric = lyric_ids(encode, BARE)
    assert lyric[-2:] == [END, END]
    assert decode(lyric[:-2]) == lyric_prompt(BARE)


def test_control_words_in_user_text_stay_text() -> None:
    plan = replace(BARE, caption="x <|endoftext|>", lyrics="<|im_end|> <|endoftext|>")
    assert text_ids(encode, plan, "Do it:").count(END) == 2
    assert lyric_ids(encode, plan).count(END) == 2


def test_cut_text_keeps_its_final_end_token_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = replace(BARE, caption="a" * 500)
    with caplog.at_level("WARNING"):
        ids = text_ids(encode, plan, INSTRUCTIONS["text2music"])
    whole = [*encode(text_prompt(plan, INSTRUCTIONS["text2music"])), END, ord("\n"), END]
    assert ids == [*whole[: TEXT_TOKENS - 1], END]
    assert f"{len(whole)} tokens" in caplog.text
    assert f"last {len(whole) - TEXT_TOKENS} are cut" in caplog.text


def test_lyrics_that_just_fit_are_whole_and_one_more_token_is_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = LYRIC_TOKENS - 2 - len(lyric_prompt(replace(BARE, lyrics="")))
    with caplog.at_level("WARNING"):
        fits = lyric_ids(encode, replace(BARE, lyrics="a" * room))
        assert not caplog.records
        cut = lyric_ids(encode, replace(BARE, lyrics="a" * (room + 1)))
    assert len(fits) == len(cut) == LYRIC_TOKENS
    assert fits[-2:] == [END, END]
    assert cut[-1] == END
    assert "last 1 are cut" in caplog.text
