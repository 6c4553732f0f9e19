"""Prompt records of every form, and what does not fit."""

from __future__ import annotations

import pytest

from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import parse_prompt
from yatt_jax.data.records import Record


def turn(role: str, content: object) -> dict:
    return {"role": role, "content": content}


def parse(fields: dict, wrap: bool = True):
    return parse_prompt(Record(fields, "p.jsonl:4"), wrap=wrap)


def test_strings():
    got = parse({"prompt": "hi", "answer": 3, "note": None})
    assert (got.messages, got.text, got.columns) == ([turn("user", "hi")], "", {"answer": 3})
    got = parse({"prompt": "hi", "answer": 3}, wrap=False)
    assert (got.messages, got.text, got.columns) == ([], "hi", {"answer": 3})
    got = parse({"text": "hi", "answer": 3})  # raw in any case
    assert (got.messages, got.text, got.columns) == ([], "hi", {"answer": 3})


def test_conversations():
    turns = [turn("system", "s"), turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    for key in ("prompt", "messages"):
        got = parse({key: turns, "answer": [1]})
        assert (got.messages, got.text, got.columns) == (turns, "", {"answer": [1]})


def test_a_last_assistant_turn():
    turns = [turn("user", "a"), turn("assistant", "b")]
    got = parse({"messages": turns})  # fine-tuning data: it is the answer
    assert (got.messages, got.columns) == (turns[:1], {"reference": "b"})
    assert parse({"messages": turns, "reference": "mine"}).columns == {"reference": "mine"}
    got = parse({"prompt": turns})  # a prompt: the response continues it
    assert (got.messages, got.columns) == (turns, {})


def test_the_first_field_that_is_there_counts():
    got = parse({"prompt": None, "messages": [turn("user", "m")], "text": "t"})
    assert (got.messages, got.columns) == ([turn("user", "m")], {"text": "t"})


def test_parts_and_tool_calls():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}]
    assert parse({"prompt": [turn("user", parts)]}).messages == [turn("user", "ab")]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}], "name": None}
    got = parse({"prompt": [turn("user", "a"), call, turn("tool", "b")]}).messages[1]
    assert got == {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"question": "a", "answer": 1},
            r"no prompt among the fields \['answer', 'question'\]; expected \"prompt\" .*\"text\"",
        ),
        ({}, r"no prompt among the fields \[\]"),
        ({"prompt": 3}, r'field "prompt": expected a string or a list of turns, found a number'),
        ({"prompt": ""}, r'field "prompt" is empty'),
        ({"prompt": []}, r'field "prompt": no turn to respond to'),
        ({"messages": "a"}, r'field "messages": expected a list of turns, found a string'),
        ({"messages": [turn("assistant", "a")]}, r'field "messages": no turn to respond to'),
        ({"text": [turn("user", "a")]}, r'field "text": expected a string, found a list'),
        ({"prompt": ["a"]}, r'field "prompt", turn 1: expected {"role", "content"}, found a string'),
        (
            {"prompt": [{"from": "u", "value": "a"}]},
            r"turn 1: expected a name under \"role\", found null \(fields: \['from', 'value'\]",
        ),
        (
            {"prompt": [turn("user", "a"), turn("user", 4)]},
            r'turn 2: expected a string or a list of parts under "content", found a number',
        ),
        ({"prompt": [turn("user", None)]}, r'turn 1: expected a string or a list of parts under "content", found null'),
        (
            {"prompt": [turn("user", [{"type": "text", "text": "a"}, {"type": "file", "file": "x.png"}])]},
            r'turn 1, part 2: found a part of type "file"; expected',
        ),
        ({"prompt": [turn("user", ["a"])]}, r"turn 1, part 1: found a string; expected"),
        ({"prompt": [turn("user", [{"type": "text"}])]}, r'turn 1, part 1: expected a string under "text", found null'),
    ],
)
def test_what_does_not_fit(fields, message):
    with pytest.raises(DataError, match=rf"p\.jsonl:4: .*{message}"):
        parse(fields)
