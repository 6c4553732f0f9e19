"""Preferences by principles, with a model whose replies are scripted, and with one that is real and random."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import constitution as tool
from yatt_jax.data.documents import Encoder
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.records import open_table
from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.errors import InputError, RunFailure
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.synth import constitution as module
from yatt_jax.synth.constitution import Constitution, Principle, read_principles, read_verdict
from yatt_jax.synth.output import Output
from yatt_jax.synth.respond import respond
from yatt_jax.synth.speaker import Speaker
from yatt_jax.types import PairRows, Prompt, Sample, TextRows

PRINCIPLES = [Principle("is it? a", "do it. a", "is a?"), Principle("is it? b", "do it. b", "is b?")]
SAID = "u:{}\na:"  # the prompt of the template


@pytest.fixture(scope="module")
def speaker(language_model: Path) -> Speaker:
    return Speaker(language_model, rows=4, max_prompt_tokens=100, sampling=Sampling(max_new_tokens=16))


@pytest.fixture
def script(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int], str]], list[str]]:
    """Lets the model reply by a function of the prompt's text and the number of the sample."""

    def use(reply: Callable[[str, int], str]) -> list[str]:
        seen: list[str] = []

        def answer(prompts: list[Prompt], ids: list[int], *, seed: int, sampling: Any = None) -> list[Sample]:
            seen.extend(prompt.text for prompt in prompts)
            found = []
            for prompt, number in zip(prompts, ids, strict=True):
                text = reply(prompt.text, number)
                finish = "length" if text.endswith("...") else "stop"
                found.append(Sample(prompt, text, [1], finish, number, 0))
            return found

        monkeypatch.setattr(speaker, "answer", answer)
        return seen

    return use


def write(
    folder: Path, speaker: Any, requests: list[Any], **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What comes of requests, and what was counted."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in requests))
    output = Output(folder / "rows.jsonl", {})
    Constitution(speaker, PRINCIPLES, **settings).write(open_table(str(folder / "prompts.jsonl")), output, batch=2)
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return lines, {name: count for name, count in output.counts.items() if count}


def test_an_answer_is_criticised_and_revised(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    def reply(text: str, number: int) -> str:
        return "good" if "do it" in text else "too bad" if "is it" in text else "bad"

    seen = script(reply)
    lines, counts = write(tmp_path, speaker, ["a b"])
    name = "ab"[lines[0]["principle"]]
    assert seen == [
        SAID.format("a b"),
        SAID.format("a b") + f"bad\nu:is it? {name}\na:",
        SAID.format("a b") + f"bad\nu:is it? {name}\na:too bad\nu:do it. {name}\na:",
    ]
    user = [{"role": "user", "content": "a b"}]
    assert lines == [
        {"prompt": user, "chosen": "good", "rejected": "bad", "critique": "too bad"}
        | {"principle": lines[0]["principle"]}
    ]
    assert counts == {"written": 1}


def test_each_round_revises_the_last_answer_by_another_principle(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    numbers = []

    def reply(text: str, number: int) -> str:
        numbers.append(number)
        return f"h{number}"

    seen = script(reply)
    ((line,), _) = write(tmp_path, speaker, ["a"], rounds=2)
    assert (line["chosen"], line["rejected"], line["critique"]) == ("h4", "h0", "h3")
    assert "a:h2\nu:is it?" in seen[3]
    assert {seen[1][-4], seen[3][-4]} == {"a", "b"}
    assert numbers == [0, 1, 2, 3, 4]


def test_samples_of_different_prompts_never_share_a_number(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    numbers: list[int] = []

    def reply(text: str, number: int) -> str:
        numbers.append(number)
        return f"h{number}"

    script(reply)
    write(tmp_path, speaker, ["a", "b", "c"], rounds=2)
    assert len(set(numbers)) == len(numbers) == 15


def test_what_leads_to_no_preference_is_counted(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    def reply(text: str, number: int) -> str:
        if "u:cut" in text:
            return "h..."
        if "u:dull" in text:
            return "" if "is it?" in text else "d"
        if "u:same" in text:
            return "s"
        return "good" if "do it" in text else "b"

    script(reply)
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines, counts = write(tmp_path, speaker, ["cut", "dull", "same", "a", "b" * 300, begun])
    assert len(lines) == 1
    assert counts == {
        "written": 1,
        "answer cut": 1,
        "critique empty": 1,
        "same answers": 1,
        "prompt overlong": 1,
        "prompt with a begun answer": 1,
    }


def test_nothing_at_all_is_a_failure(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    script(lambda text, number: "s")
    with pytest.raises(RunFailure, match=r"not one preference came about \(same answers: 1\)"):
        write(tmp_path, speaker, ["a"])
    assert not (tmp_path / "rows.jsonl").exists()


def choose(text: str, number: int, wanted: Callable[[str, str], str]) -> str:
    """Two answers to each request, and then which of them is wanted."""
    if "Answer A" not in text:
        return "abcd"[number % 4] + "ad"
    a, b = (text.split(f"Answer {name}:\n")[1].split("\n")[0] for name in "AB")
    return wanted(a, b)


QUESTION = "Here: {request} Answer A:\n{a}\nAnswer B:\n{b}\n{principle}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, speaker: Speaker) -> None:
    """A question that the tokenizer of single characters is not asked to encode."""
    monkeypatch.setattr(module, "_QUESTION", QUESTION)
    ask = speaker.ask

    def shown(turns: Any, **named: Any) -> Prompt:
        if "Answer A" in turns[-1]["content"]:
            return Prompt(turns, turns[-1]["content"], [1], {}, "", named["index"])
        return ask(turns, **named)

    monkeypatch.setattr(speaker, "ask", shown)


@pytest.mark.usefixtures("short")
def test_the_answer_that_is_chosen_in_both_orders_is_preferred(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    seen = script(lambda text, number: choose(text, number, lambda a, b: "A" if a < b else "(B)"))
    lines, counts = write(tmp_path, speaker, ["a", "b"], pairs="choice")
    assert [(line["chosen"], line["rejected"]) for line in lines] == [("aad", "bad"), ("aad", "bad")]
    assert counts == {"written": 2}
    assert seen[4].startswith("Here: a Answer A:\naad\nAnswer B:\nbad\nis ")
    assert seen[6].startswith("Here: a Answer A:\nbad\nAnswer B:\naad\nis ")


@pytest.mark.usefixtures("short")
def test_a_choice_by_order_or_of_neither_does_not_count(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    def wanted(text: str, number: int) -> str:
        if "Here: c" in text:
            return choose(text, number, lambda a, b: "B" if a < b else "A")
        return choose(text, number, lambda a, b: "A" if "Here: a" in text else "both are good")

    script(wanted)
    lines, counts = write(tmp_path, speaker, ["a", "b", "c"], pairs="choice")
    assert [line["chosen"] for line in lines] == ["bad"]
    assert counts == {"written": 1, "verdict by order": 1, "verdict malformed": 1}


def test_verdicts() -> None:
    for text, verdict in (
        ("A", "A"), ("(B)", "B"), ("Answer B.", "B"), ("**A**", "A"), ("answer: B", "B"), ("B, because", "B"),
        ("A good answer", ""), ("Both", ""), ("", ""), ("It is A", ""),
    ):  # fmt: skip
        assert read_verdict(text) == verdict, text


def test_preferences_and_answers_are_read_by_training(tmp_path: Path, speaker: Speaker, script: Any) -> None:
    script(lambda text, number: "good" if "do it" in text else "bad")
    tokenizer = load_tokenizer(str(speaker.path))
    for form, kind in (("preferences", PairRows), ("answers", TextRows)):
        (tmp_path / form).mkdir()
        write(tmp_path / form, speaker, ["a", "b"], form=form)
        encoder = Encoder(OfflineConfig(), tokenizer, kind)
        table = encoder.open(str(tmp_path / form / "rows.jsonl"))
        (outcome, _) = encoder.read([(i, table[i]) for i in range(2)])
        assert outcome.row is not None
        texts = [tokenizer.decode(document.tokens) for document in outcome.row.documents]
        assert texts == [f"u:a\na:{said}\n<eos>" for said in (("good", "bad") if form == "preferences" else ("good",))]


def test_principles_must_have_what_they_are_for(tmp_path: Path) -> None:
    file = tmp_path / "principles.jsonl"
    file.write_text('{"critique": "a", "revision": "b"}\n{"critique": "a", "choice": "c"}\n')
    with pytest.raises(InputError, match=r'principles\.jsonl:2: field "revision": expected a string'):
        read_principles(file, "revision")
    with pytest.raises(InputError, match=r'principles\.jsonl:1: field "choice": expected a string'):
        read_principles(file, "choice")
    for pairs in ("revision", "choice"):
        assert len(read_principles("configs/data/principles.jsonl", pairs)) == 4


def test_a_command_that_was_killed_goes_on_to_the_same_file(
    language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With a real model, whose words mean nothing."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": a + b}) + "\n" for a in "abcdef" for b in "abcd")
    )
    told = [dataclasses.asdict(principle) for principle in PRINCIPLES]
    (tmp_path / "principles.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))

    def run(out: str) -> int:
        words = [str(language_model), f"--data={tmp_path}/prompts.jsonl", f"--principles={tmp_path}/principles.jsonl"]
        words += [f"--out={tmp_path}/{out}", "--batch=6", "--max_new_tokens=28", "--max_prompt_tokens=100"]
        return tool.main(words)

    assert run("whole.jsonl") == 0
    assert "written" in capsys.readouterr().out
    answer, calls = Speaker.answer, []

    def ends(self: Speaker, *args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return answer(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Speaker, "answer", ends)
        with pytest.raises(KeyboardInterrupt):
            run("rows.jsonl")
    assert run("rows.jsonl") == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_plain_text_cannot_be_criticised(tmp_path: Path, speaker: Speaker) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b"}\n')
    with pytest.raises(InputError, match=r"prompts\.jsonl:1: plain text; critiques need conversations"):
        Constitution(speaker, PRINCIPLES).write(
            open_table(str(tmp_path / "prompts.jsonl")), Output(tmp_path / "rows.jsonl", {})
        )
    respond(speaker, open_table(str(tmp_path / "prompts.jsonl")), Output(tmp_path / "plain.jsonl", {}), samples=9)
    line = json.loads((tmp_path / "plain.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == "a b"
    assert line["completion"]
