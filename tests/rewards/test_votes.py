"""What completions answer."""

from __future__ import annotations

from yatt_jax.rewards.votes import boxed, number, text


def test_the_whole_text(sample):
    assert text([sample(" Yes "), sample("yes"), sample("  ")]) == ["yes", "yes", None]


def test_the_last_number(sample):
    found = number([sample("first 2, then 3/4"), sample(".75"), sample("1,000"), sample("none")])
    assert found == ["0.75", "0.75", "1000.0", None]


def test_the_last_box(sample):
    completions = [r"\boxed{1} or \boxed{ \frac{1}{2} }", r"\boxed{\frac{1}{2}}", r"\boxed{1", "1", r"\boxed{ }"]
    assert boxed([sample(c) for c in completions]) == [r"\frac{1}{2}", r"\frac{1}{2}", None, None, None]
