"""Talking to a model that is steered by attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import chat
from yatt_jax.synth.speaker import Speaker
from yatt_jax.types import Prompt, Sample


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the model got; it answers "h"."""
    found: list[str] = []

    def answer(self: Speaker, prompts: list[Prompt], ids: list[int], *, seed: int) -> list[Sample]:
        found.extend(prompt.text for prompt in prompts)
        return [Sample(prompt, "h", [1], "stop", number, 0) for prompt, number in zip(prompts, ids, strict=True)]

    monkeypatch.setattr(Speaker, "answer", answer)
    return found


def talk(monkeypatch: pytest.MonkeyPatch, model: Path, said: list[str], *more: str) -> int:
    """What the user types, line by line."""
    lines = iter(said)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    return chat.main([str(model), "--max_new_tokens=4", *more])


def test_answers_go_on_from_the_attributes(monkeypatch, language_model: Path, seen: list[str], capsys: Any) -> None:
    said = ["a", "b", "/attributes quality:0", "c", "/attributes", "d", "/reset", "e", "/quit"]
    assert talk(monkeypatch, language_model, said, "--attributes=quality:4,humor:0", "--system=be") == 0
    first = "s:be\nu:a\na:quality:4,humor:0\n"
    assert seen[:4] == [
        first,
        f"{first}h\nu:b\na:quality:4,humor:0\n",
        f"{first}h\nu:b\na:quality:4,humor:0\nh\nu:c\na:quality:0\n",
        f"{first}h\nu:b\na:quality:4,humor:0\nh\nu:c\na:quality:0\nh\nu:d\na:",
    ]
    assert seen[4] == "s:be\nu:e\na:"
    assert capsys.readouterr().out == "h\n" * 5


def test_a_label_that_is_none_is_told(monkeypatch, language_model: Path, seen: list[str], capsys: Any) -> None:
    assert talk(monkeypatch, language_model, [], "--attributes=quality") == 2
    assert 'attributes: expected "attribute:number" parts' in capsys.readouterr().err
    assert talk(monkeypatch, language_model, ["/attributes quality", "a", "/quit"]) == 0
    assert 'expected "attribute:number" parts' in capsys.readouterr().err
    assert seen == ["u:a\na:"]


def test_a_conversation_that_grows_too_long(monkeypatch, language_model: Path, seen: list[str], capsys: Any) -> None:
    assert talk(monkeypatch, language_model, ["a" * 200, "b", "/quit"]) == 0
    assert "205 tokens; /reset, or raise --max_prompt_tokens" in capsys.readouterr().err
    assert seen == ["u:b\na:"]
    assert talk(monkeypatch, language_model, [], f"--once={'a' * 200}") == 2
    assert talk(monkeypatch, language_model, [], "--once= ") == 2
    assert "--once needs a text" in capsys.readouterr().err
