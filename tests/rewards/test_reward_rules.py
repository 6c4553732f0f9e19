"""Rewards by rule: worked examples."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from yatt_jax.errors import InputError
from yatt_jax.rewards import rules


def test_exact_match(sample):
    samples = [sample(" Paris\n", answer="Paris"), sample("paris", answer="Paris"), sample("7", answer=7)]
    assert rules.exact_match(samples) == [1, 0, 1]
    assert rules.exact_match(samples, strip=False) == [0, 0, 1]
    assert rules.exact_match(samples, ignore_case=True) == [1, 1, 1]
    assert rules.exact_match([sample("b", gold=["a", "b"]), sample("c", gold=["a", "b"])], answer="gold") == [1, 0]
    with pytest.raises(InputError, match=r'field "answer" is an empty list'):
        rules.exact_match([sample("b", answer=[])])


def test_regex_match(sample):
    samples = [sample("so <b>4</b>", form=r"\d$"), sample("<B>4</B>\n", form=r"^<B>")]
    assert rules.regex_match(samples, pattern=r"<b>\d</b>") == [1, 0]
    assert rules.regex_match(samples, pattern=r"(?i)<b>\d</b>", full=True) == [0, 1]
    assert rules.regex_match(samples, column="form") == [0, 1]
    with pytest.raises(InputError, match=r"p\.jsonl:1: malformed regular expression '\(': "):
        rules.regex_match(samples, pattern="(")
    both: list[dict[str, Any]] = [{}, {"pattern": "a", "column": "form"}]
    for given in both:
        with pytest.raises(InputError, match="give one of pattern and column"):
            rules.regex_match(samples, **given)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", 42),
        ("-3.5 degrees", -3.5),
        ("1,234,567.25 in all", 1234567.25),
        ("first 3, then 4", 4),
        ("10-5", 5),
        ("x=-5", -5),
        ("2 \u2212 1 = \u22121", -1),
        ("1.5e-3", 0.0015),
        (".5", 0.5),
        ("3/4", 0.75),
        ("-1 / 8", -0.125),
        ("50%", 50),
        ("$1,200", 1200),
        ("v1.2.3", 3),
        ("1/0", None),
        ("1e999", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert rules.last_number(text) == number


def test_numeric_equal(sample):
    samples = [
        sample("so it is 0.3333333", answer="1/3"),
        sample("3 apples, so 12", answer=12),
        sample("12 of them, not 13", answer=12),
        sample("no idea", answer=0),
        sample("1000001", answer=1e6),
    ]
    assert rules.numeric_equal(samples) == [1, 1, 0, 0, 1]
    assert rules.numeric_equal(samples, tolerance=1e-9) == [0, 1, 0, 0, 0]
    marked = [sample("#### 12\nWas it 13?", answer=12), sample("12", answer=12)]
    assert rules.numeric_equal(marked, pattern=r"####\s*(.*)") == [1, 0]
    with pytest.raises(InputError, match=r"p\.jsonl:8: field \"answer\": expected a number, found 'many'"):
        rules.numeric_equal([sample("1", answer="many")])


def test_length(sample):
    samples = [sample("a b c", tokens=n) for n in (10, 5, 15, 0, 25, 20)]
    assert rules.length([*samples[:3], *samples[4:]], target=10) == [1, 0.5, 0.5, 0, 0]
    assert rules.length(samples[:2], target=10, width=20) == [1, 0.75]
    assert rules.length(samples[:1], target=4, unit="words") == [0.75]
    assert rules.length(samples[:1], target=10, unit="characters") == [0.5]
    assert rules.length([sample("", tokens=1)], target=0, unit="words") == [1]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"target": -1}, "must not be negative"),
        ({"target": 1, "unit": "lines"}, "unit = 'lines'"),
    ]
    for given, message in wrong:
        with pytest.raises(InputError, match=message):
            rules.length(samples, **given)


def test_sentiment(sample):
    pytest.importorskip("vaderSentiment")
    # VADER: the lexicon's valence x (great 3.1, terrible -2.1, lamp none) becomes x / sqrt(x^2 + 15).
    values = rules.sentiment([sample("great"), sample("terrible"), sample("lamp"), sample("")])
    assert values == pytest.approx([0.6249, -0.4767, 0.0, 0.0], abs=1e-4)


def test_sentiment_without_the_extra(sample, monkeypatch):
    rules._analyzer.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(InputError, match=r"pip install 'yatt_jax\[demo\]'"):
        rules.sentiment([sample("a")])
    rules._analyzer.cache_clear()


@pytest.mark.parametrize(
    ("prompt", "completion", "finish", "reward"),
    [
        ("274", "56789", "stop", 1.0),
        ("274", "56789", "length", 5 / 6),
        ("274", "567890", "stop", 5 / 6),
        ("274", "5678", "stop", 4 / 6),
        ("274", "56799", "stop", 3 / 6),
        ("274", "46789", "stop", 0.0),
        ("274", "", "stop", 0.0),
        ("039", "", "stop", 1.0),
        ("039", "", "length", 0.0),
        ("039", "0", "stop", 0.0),
        ("120", "123456789", "stop", 1.0),
        ("128", "9", "stop", 1.0),
        ("128", "9" * 10, "length", 0.5),
    ],
)
def test_digits(sample, prompt, completion, finish, reward):
    assert rules.digits([sample(completion, text=prompt, finish=finish)]) == [pytest.approx(reward)]


def test_no_fixed_response_does_well_at_digits(sample):
    best = 0.0
    for response in ("", "9", "89", "1", "123456789", "5", "56789"):
        for finish in ("stop", "length"):
            values = [rules.digits([sample(response, text=f"00{d}", finish=finish)])[0] for d in range(10)]
            best = max(best, sum(values) / 10)
    assert best == pytest.approx(0.1)


def test_digits_needs_a_prompt_of_digits(sample):
    for text in ("27:", ""):
        with pytest.raises(InputError, match="expected a prompt of digits"):
            rules.digits([sample("1", text=text)])


def test_digits_of_a_conversation_are_the_users(sample):
    """Its text ends with what the chat template writes."""
    one = sample("89", text="user: 907\nassistant: ")
    turns = [
        {"role": "user", "content": "900"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "907"},
    ]
    asked = dataclasses.replace(one, prompt=dataclasses.replace(one.prompt, messages=turns))
    assert rules.digits([asked]) == [1.0]


def test_shuffled_deals_the_same_rewards_to_others(sample):
    samples = [sample("56789" if i % 2 else "1", text="274") for i in range(40)]
    dealt = rules.shuffled(samples)
    assert sorted(dealt) == sorted(rules.digits(samples))
    assert dealt != rules.digits(samples)
    assert dealt == rules.shuffled(samples)
    assert dealt != rules.shuffled(samples, seed=1)
    later = samples[1:] + samples[:1]
    assert rules.shuffled(later) != dealt
    assert rules.shuffled([]) == []
