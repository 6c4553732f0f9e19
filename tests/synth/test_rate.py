"""Ratings of answers: transformers gives the same, and fine-tuning reads the labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tools import annotate as tool
from yatt_jax.data.attributes import ATTRIBUTES, parse_label
from yatt_jax.data.documents import Encoder
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.errors import InputError
from yatt_jax.synth.rate import Scale, columns
from yatt_jax.types import TextRows

NAMES = ("toxicity", "correctness")
TURNS = [("user", "d"), ("assistant", "e f"), ("user", "g"), ("assistant", "h")]
CHATS: list[Any] = [
    {"prompt": "a b", "completion": "c"},
    {"messages": [{"role": role, "content": text} for role, text in TURNS]},
    {"prompt": "a", "completion": "b" * 100},
    {"system": "be", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]


def run(model: Path, data: Path, out: Path, *more: str) -> int:
    words = [str(model), f"--data={data}", f"--out={out}", "--max_tokens=40", "--batch=2"]
    return tool.main([*words, f"--attributes={','.join(NAMES)}", "--low=-1", "--high=1", "--step=0.01", *more])


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return file


def by_torch(model: Path, text: str) -> list[float]:
    tokens = load_tokenizer(str(model))(text)["input_ids"]
    torch_model = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        hidden = torch_model.model(torch.tensor([tokens])).last_hidden_state
        outputs = torch_model.score(hidden)[0, -1].numpy()
    return [float(outputs[ATTRIBUTES.index(name)]) for name in NAMES]


def test_answers_are_rated_as_transformers_does(attribute_model: Path, chats: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows.jsonl"
    assert run(attribute_model, chats, out) == 0
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert "3 conversations; 1 could not be rated" in capsys.readouterr().out  # that of 100 characters
    # The template ends a turn with a line break, and the data has an end token after the last.
    texts = {
        (0, 1): "u:a b\na:c\n",
        (1, 1): "u:d\na:e f\n",
        (1, 3): "u:d\na:e f\nu:g\na:h\n",
        (2, 1): "s:be\nu:a\na:b\n",
    }
    for (row, turn), text in texts.items():
        written = parse_label(found[row]["conversations"][turn]["label"])
        for name, value in zip(NAMES, by_torch(attribute_model, text + "<eos>"), strict=True):
            assert abs(written[name] - np.clip(value, -1, 1)) < 0.0051
    assert [(row.get("system"), row["mask"], row["type"]) for row in found] == [
        (None, "User", "VALUE_TO_TEXT"),
        (None, "User", "VALUE_TO_TEXT"),
        ("be", "User", "VALUE_TO_TEXT"),
    ]
    assert [turn["from"] for turn in found[2]["conversations"]] == ["User", "Assistant"]


def test_fine_tuning_is_conditioned_on_the_labels(attribute_model: Path, chats: Path, tmp_path: Path) -> None:
    assert run(attribute_model, chats, tmp_path / "rows.jsonl") == 0
    tokenizer = load_tokenizer(str(attribute_model))
    encoder = Encoder(OfflineConfig(), tokenizer, TextRows)
    table = encoder.open(str(tmp_path / "rows.jsonl"))
    (outcome,) = encoder.read([(0, table[0])])
    assert outcome.row is not None
    (document,) = outcome.row.documents
    label = table[0].fields["conversations"][1]["label"]
    assert tokenizer.decode(document.tokens) == f"u:a b\na:{label}\nc\n<eos>"
    assert str(tokenizer.decode(document.tokens[document.mask])).startswith("c")


def test_it_goes_on_and_does_not_repeat(attribute_model: Path, chats: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows.jsonl"
    assert run(attribute_model, chats, out) == 0
    first = capsys.readouterr().out
    assert run(attribute_model, chats, out) == 0
    assert capsys.readouterr().out == first
    assert run(attribute_model, chats, out, "--step=0.5") == 2
    assert "config.step: 0.01 -> 0.5" in capsys.readouterr().err


def test_a_text_has_no_answer(attribute_model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a b"}\n')
    assert run(attribute_model, tmp_path / "texts.jsonl", tmp_path / "rows.jsonl") == 2
    assert "texts.jsonl:1: a text and no conversation" in capsys.readouterr().err


def test_a_language_model_rates_nothing(language_model: Path, chats: Path, tmp_path: Path, capsys) -> None:
    assert run(language_model, chats, tmp_path / "rows.jsonl") == 2
    assert "holds a language model and no score" in capsys.readouterr().err


def test_ratings_are_rounded_within_the_scale() -> None:
    assert [Scale().round(value) for value in (-3.0, 1.4, 1.6, 9.0)] == [0, 1, 2, 4]
    assert Scale(-1, 1, 0.5).round(0.3) == 0.5
    for bad in ((1, 1, 1), (0, 4, 0)):
        with pytest.raises(InputError, match="no such scale"):
            Scale(*bad)


def test_attributes_by_name_or_in_order() -> None:
    assert columns(["humor", "quality"], 9) == [2, 0]
    assert columns(["right", "long"], 2) == [0, 1]
    for names, outputs, message in (
        (["humour"], 9, r"no attribute 'humour' \(did you mean 'humor'\?\)"),
        (["right"], 2, "2 outputs, and 1 attributes are named"),
        (["a", "a"], 2, "named twice"),
        (["a:b"], 1, "without colons"),
    ):
        with pytest.raises(InputError, match=message):
            columns(names, outputs)
