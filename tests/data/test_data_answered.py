"""Prompts with the answers of fine-tuning data."""

from __future__ import annotations

import re
from typing import Any

import pytest

from yatt_jax.data.answered import AnsweredReader
from yatt_jax.data.config import DataConfig, DataError, SourceConfig
from yatt_jax.data.prompts import PromptSource
from yatt_jax.data.records import Record

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture
def read(plain_tokenizer, chat_tokenizer):
    """Reads a record; gives the texts of prompt and answer, or what is wrong."""

    def outcome(fields: dict[str, Any], *, chat: bool = True, limit: int = 10, **settings: Any) -> Any:
        tokenizer = chat_tokenizer if chat else plain_tokenizer
        reader = AnsweredReader(DataConfig(**settings), tokenizer, limit)
        (found,) = reader.read([(3, Record(fields, "f.jsonl:4"))])
        if found.prompt is None:
            return found.fault, found.message
        assert found.prompt.index == 3
        texts = tokenizer.decode(found.prompt.tokens), tokenizer.decode(found.prompt.answer)
        return (*texts, dict(found.prompt.columns)), found.fault

    return outcome


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TURNS[:3], "completion": "no"},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"messages": TURNS},
        {"input": TURNS[:3], "output": "no"},
        {
            "conversations": [
                {"from": who, "value": turn["content"]} for who, turn in zip(["human", "gpt"] * 2, TURNS, strict=True)
            ]
        },
    ],
)
def test_the_last_answer_of_every_format(read, record) -> None:
    found, fault = read({**record, "level": 5})
    assert found == ("[u]hi<end>[a]yo<end>[u]so<end>[a]", "no<end>", {"completion": "no", "level": 5})
    assert fault == ""


def test_plain_texts(read) -> None:
    assert read({"prompt": "hi ", "completion": "yo"}, chat=False) == (("hi ", "yo<eos>", {"completion": "yo"}), "")
    assert read({"prompt": "hi", "completion": "yo"})[0][:2] == ("[u]hi<end>[a]", "yo<end>")
    assert read({"prompt": "hi", "completion": "yo"}, chat_template="raw")[0][:2] == ("hi", "yo<eos>")


def test_turns_after_the_last_answer_are_left_out(read) -> None:
    assert read({"messages": [*TURNS, TURNS[0]]})[0][:2] == ("[u]hi<end>[a]yo<end>[u]so<end>[a]", "no<end>")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "hi"}, r'f\.jsonl:4: field "text": there is no prompt to answer'),
        ({"messages": TURNS[1:2]}, r"f\.jsonl:4: there is no prompt before the last answer"),
        ({"messages": TURNS[:1]}, r'f\.jsonl:4: field "messages": no turn of the assistant'),
        ({"prompt": "hi"}, r"f\.jsonl:4: fits no format"),
        ({"prompt": "hi", "completion": 3}, r'f\.jsonl:4: field "completion": expected a string'),
        (
            {
                "conversations": [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b", "label": "q:1"}],
                "mask": "User",
                "type": "VALUE_TO_TEXT",
            },
            r"f\.jsonl:4: answers that are conditioned on labels",
        ),
    ],
)
def test_records_that_do_not_fit(read, record, message) -> None:
    fault, said = read(record)
    assert fault == "malformed"
    assert re.match(message, said), said


def test_long_ones(read) -> None:
    long = {"prompt": "hi", "completion": "yo" * 5}
    message = "f.jsonl:4: an answer of 11 tokens, and rollout.sampling.max_new_tokens is 10"
    assert read(long) == ("overlong", message)
    found, fault = read(long, overlong="cut")
    assert (found[1], fault) == ("yo" * 5, "cut")
    fault, said = read({"prompt": "hi" * 9, "completion": "yo"}, max_prompt_tokens=8)
    assert fault == "overlong"
    assert "a prompt of 21 tokens" in said
    found, fault = read({"prompt": "hi" * 9, "completion": "yo"}, max_prompt_tokens=8, overlong="cut")
    assert (found[:2], fault) == (("[u]ihihi<end>[a]", "yo<end>"), "cut")


def test_they_are_drawn_as_prompts_are(write, plain_tokenizer) -> None:
    path = write("rows.jsonl", [{"prompt": f"{a} ", "completion": a.upper()} for a in "abcdef"])
    config = DataConfig(train=(SourceConfig(path),), holdout=2)
    reader = AnsweredReader(config, plain_tokenizer, 4)
    source = PromptSource(config, plain_tokenizer, prompts_per_step=2, reader=reader)
    drawn = [prompt for _ in range(2) for prompt in next(source)]
    assert sorted(prompt.text for prompt in [*drawn, *source.evaluation()]) == [f"{a} " for a in "abcdef"]
    for prompt in drawn:
        assert plain_tokenizer.decode(prompt.answer) == prompt.text[0].upper() + "<eos>"
    bad = write("bad.jsonl", [{"prompt": "a", "completion": "b"}, {"text": "c"}])
    with pytest.raises(DataError, match=r"bad\.jsonl:2: field \"text\": there is no prompt"):
        PromptSource(DataConfig(train=(SourceConfig(bad),)), plain_tokenizer, prompts_per_step=1, reader=reader)
