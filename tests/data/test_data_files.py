"""The prompt files that come with the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from yatt_jax.data.records import open_table

FOLDER = Path(__file__).parents[2] / "configs" / "data"


def prompts(name: str) -> list[str]:
    table = open_table(str(FOLDER / f"{name}.jsonl"))
    rows = [table[i].fields for i in range(len(table))]
    assert all(set(row) == {"prompt"} for row in rows)
    return [row["prompt"] for row in rows]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z']+", text.lower()))


@pytest.mark.parametrize(("name", "train", "held_out"), [("smollm2_prompts", 332, 64), ("digits", 940, 60)])
def test_splits_share_no_prompt(name, train, held_out):
    both = prompts(f"{name}_train"), prompts(f"{name}_eval")
    assert tuple(map(len, both)) == (train, held_out)
    if name == "digits":
        assert len(set(both[0]) | set(both[1])) == 1000
    else:
        assert len({words(text) for part in both for text in part}) == 396  # also not in other words' order


def test_smollm2_prompts_are_short_varied_and_ask_for_no_mood():
    everything = prompts("smollm2_prompts_train") + prompts("smollm2_prompts_eval")
    lengths = [len(text.split()) for text in everything]
    assert min(lengths) >= 5
    assert max(lengths) <= 20
    leading = [" ".join(text.split()[:2]) for text in everything]
    assert len(set(leading)) > 90
    asks = re.compile(r"\b(positive|cheerful|happy|happily|optimistic|upbeat|nice|great|wonderful)\b", re.IGNORECASE)
    assert [text for text in everything if asks.search(text)] == []


def test_smollm2_prompts_are_themselves_neutral():
    sentiment = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
    scores = [sentiment.polarity_scores(text)["compound"] for text in prompts("smollm2_prompts_train")]
    assert abs(sum(scores) / len(scores)) < 0.1


def test_digits_have_every_last_digit_in_both_splits():
    for part in ("train", "eval"):
        found = prompts(f"digits_{part}")
        assert {text[-1] for text in found} == set("0123456789")
        assert all(re.fullmatch(r"\d{3}", text) for text in found)
