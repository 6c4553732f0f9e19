"""Answers of a model as data: steered, resumable, and in a format that fine-tuning reads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools import respond as tool
from yatt_jax.data.documents import Encoder
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.rollout.engine import Engine
from yatt_jax.types import TextRows

LABELS = ["--attributes=quality:4", "--attributes=quality:0,toxicity:1"]


def run(model: Path, prompts: Path, out: Path, *more: str) -> int:
    words = [str(model), f"--data={prompts}", f"--out={out}", "--max_new_tokens=12", "--max_prompt_tokens=60"]
    return tool.main([*words, "--samples=3", "--batch=2", *more])


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def steered(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Answers at two attributes, and their prompts."""
    folder = tmp_path_factory.mktemp("respond")
    rows = [{"prompt": f"{a} {b}"} for a in "abc" for b in "de"] + [{"prompt": "a" * 200}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(language_model, folder / "prompts.jsonl", folder / "rows.jsonl", *LABELS) == 0
    return folder / "rows.jsonl", folder / "prompts.jsonl"


def test_every_prompt_is_answered_at_every_label(steered: tuple[Path, Path]) -> None:
    found = lines(steered[0])
    made = json.loads(steered[0].with_name("rows.jsonl.made").read_text())
    assert made["counts"]["prompt overlong"] == 1
    dropped = sum(made["counts"].get(f"answer {why}", 0) for why in ("cut", "empty"))
    assert len(found) == made["counts"]["written"] == 6 * 2 * 3 - dropped
    assert dropped > 0
    asked = Counter(line["asked"] for line in found)
    assert set(asked) == {"quality:4", "quality:0,toxicity:1"}
    for line in found:
        user, assistant = line["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert not assistant["content"].startswith("quality")


def test_fine_tuning_reads_them(steered: tuple[Path, Path], language_model: Path) -> None:
    from yatt_jax.data.tokenizer import load_tokenizer

    encoder = Encoder(OfflineConfig(), load_tokenizer(str(language_model)), TextRows)
    table = encoder.open(str(steered[0]))
    assert not [o.message for o in encoder.read([(i, table[i]) for i in range(len(table))]) if o.fault]


def test_a_command_that_was_killed_goes_on_to_the_same_file(
    steered: tuple[Path, Path], language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, answered = tmp_path / "rows.jsonl", []
    generate = Engine.generate

    def ends(self: Engine, *args: Any, **named: Any) -> Any:
        answered.append(named["sample_ids"])
        if len(answered) == 3:
            raise KeyboardInterrupt
        return generate(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", ends)
        with pytest.raises(KeyboardInterrupt):
            run(language_model, steered[1], out, *LABELS)
    assert not out.exists()
    assert run(language_model, steered[1], out, *LABELS) == 0
    assert out.read_bytes() == steered[0].read_bytes()


def test_answers_begin_after_the_label(
    language_model: Path, steered: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    generate = Engine.generate

    def looks(self: Engine, params: Any, prompts: Any, *args: Any, **named: Any) -> Any:
        seen.extend(prompt.text for prompt in prompts)
        return generate(self, params, prompts, *args, **named)

    monkeypatch.setattr(Engine, "generate", looks)
    assert run(language_model, steered[1], tmp_path / "rows.jsonl", *LABELS) == 0
    assert seen[0] == "u:a d\na:quality:4\n"
    assert set(seen[:6]) == {"u:a d\na:quality:4\n", "u:a d\na:quality:0,toxicity:1\n"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--attributes=quality"], 'expected "attribute:number"'),
        (["--samples=0"], "--samples=0: must be at least 1"),
        (["--top_p=2"], "sampling.top_p = 2.0"),
        (["--chat_template=nowhere.jinja"], 'expected "auto", "raw" or an existing jinja file'),
        (["--max_new_tokens=128"], "leave no room for a prompt in the model's 128 positions"),
        (["--max_new_tokens=1"], "no answer can be used (answer "),
    ],
)
def test_what_cannot_be_done_is_said(
    language_model: Path, prompts: Path, tmp_path: Path, capsys: Any, more: list[str], message: str
) -> None:
    assert run(language_model, prompts, tmp_path / "rows.jsonl", *more) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()
