"""Tasks of reasoning-gym as prompts, with a stand-in for the package and, where it is installed, with itself."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from yatt_jax.data.config import DataConfig, DataError, SourceConfig
from yatt_jax.data.gym import GymTable, open_prompts
from yatt_jax.data.prompts import PromptSource
from yatt_jax.data.tokenizer import character_tokenizer
from yatt_jax.errors import InputError
from yatt_jax.rewards import RewardSpec, gym
from yatt_jax.rewards.spec import resolve
from yatt_jax.types import Prompt, Sample


class Sums:
    """A task of the stand-in: two numbers to add up."""

    def __init__(self, seed: int, size: int = 500, most: int = 9, words: tuple[str, ...] = ()) -> None:
        if size < 1:
            raise ValueError("size must be positive")
        self.size, self.seed, self.most, self.words = size, seed, most, words

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        a, b = (self.seed + row) % self.most, row % self.most
        metadata = {"source_dataset": "sums", "source_index": row}
        return {"question": f"{a} + {b}", "answer": str(a + b), "metadata": metadata}


def judge(answer: str | None, entry: dict[str, Any]) -> float:
    """The stand-in's reward: half of it for any number."""
    return 1.0 if answer == entry["answer"] else 0.5 * bool(answer and answer.isdigit())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one task."""
    package: Any = types.ModuleType("reasoning_gym")
    factory: Any = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": None}
    package.create_dataset = lambda name, **settings: Sums(**settings)

    def get_score_answer_fn(name: str) -> Any:
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return judge

    package.get_score_answer_fn = get_score_answer_fn
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    gym._judge.cache_clear()


def answered(completion: str, **columns: Any) -> Sample:
    return Sample(Prompt([], "1 + 2", [1], columns, "here:1", 0), completion, [1], "stop", 0, 0)


def test_tasks_are_records(stand_in: None) -> None:
    table = open_prompts("reasoning_gym:sums?size=3&seed=4&most=5")
    assert isinstance(table, GymTable)
    assert [table[i].fields["prompt"] for i in range(len(table))] == ["4 + 0", "0 + 1", "1 + 2"]
    assert table[2].fields["answer"] == "3"
    assert table[2].fields["metadata"] == {"source_dataset": "sums", "source_index": 2}
    assert table[2].source == "reasoning_gym:sums?size=3&seed=4&most=5:3"
    assert len(open_prompts("reasoning_gym:sums")) == 500
    assert GymTable('reasoning_gym:sums?words=["a","b"]')._tasks.words == ["a", "b"]


def test_they_are_drawn_and_held_out_like_any_other(stand_in: None) -> None:
    config = DataConfig(train=(SourceConfig("reasoning_gym:sums?size=20"),), holdout=4)
    source = PromptSource(config, character_tokenizer("0123456789+ "), prompts_per_step=4)
    drawn, held_out = next(source), source.evaluation()
    assert [len(drawn), len(held_out)] == [4, 4]
    assert not {prompt.text for prompt in drawn} & {prompt.text for prompt in held_out}
    [value] = gym.score([Sample(drawn[0], drawn[0].columns["answer"], [1], "stop", 0, 0)])
    assert value == 1


def test_the_reward_is_the_tasks_own(stand_in: None) -> None:
    task = {"answer": "3", "metadata": {"source_dataset": "sums"}}
    assert gym.score([answered(text, **task) for text in (" 3\n", "4", "three", "")]) == [1, 0.5, 0, 0]
    tagged = resolve(RewardSpec("yatt_jax.rewards.gym:score", kwargs={"tag": "answer"}), "gym")
    texts = ["<answer>4</answer> no, <answer>\n3 </answer>", "3", "<answer>4</answer>"]
    assert list(tagged([answered(text, **task) for text in texts])) == [1, 0, 0.5]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:sum", r"reasoning_gym:sum: reasoning-gym has no task 'sum' \(did you mean 'sums'"),
        ("reasoning_gym:sums?size=0", "sums does not take these settings: size must be positive"),
        ("reasoning_gym:sums?sice=9", "sums does not take these settings: .*'sice'"),
        ("reasoning_gym:sums?size", "expected KEY=VALUE&KEY=VALUE after the question mark"),
    ],
)
def test_sources_that_do_not_fit(stand_in: None, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_prompts(path)


def test_prompts_that_are_no_tasks(stand_in: None) -> None:
    with pytest.raises(InputError, match=r"here:1: no task of reasoning-gym: .* and has \['answer'\]"):
        gym.score([answered("3", answer="3")])
    with pytest.raises(InputError, match="here:1: Dataset 'other' not registered"):
        gym.score([answered("3", answer="3", metadata={"source_dataset": "other"})])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym._judge.cache_clear()
    with pytest.raises(DataError, match=r"needs reasoning-gym: pip install 'yatt_jax\[gym\]'"):
        open_prompts("reasoning_gym:sums")
    with pytest.raises(InputError, match=r"needs reasoning-gym: pip install 'yatt_jax\[gym\]'"):
        gym.score([answered("3", answer="3", metadata={"source_dataset": "sums"})])


def test_the_package_itself() -> None:
    pytest.importorskip("reasoning_gym")
    gym._judge.cache_clear()
    for name in ("chain_sum", "leg_counting", "spell_backward"):
        path = f"reasoning_gym:{name}?size=5&seed=3"
        one, again = open_prompts(path), open_prompts(path)
        assert len(one) == 5
        for row in range(5):
            record = one[row]
            assert record.fields == again[row].fields
            columns = {key: value for key, value in record.fields.items() if key != "prompt"}
            prompt = Prompt([], record.fields["prompt"], [1], columns, record.source, row)
            texts = [record.fields["answer"], "no idea"]
            values = gym.score([Sample(prompt, text, [1], "stop", 0, 0) for text in texts])
            assert values[0] == 1 > values[1]
    with pytest.raises(DataError, match="chain_sum does not take these settings"):
        open_prompts("reasoning_gym:chain_sum?min_terms=-1")
