"""``docs/adding.md`` shows files as they are, and a reward that works."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import pytest

from yatt_jax.config import load_algo
from yatt_jax.rewards import RewardSpec, build
from yatt_jax.types import Prompt, Sample

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adding.md").read_text("utf-8")
SHOWN = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("file", "text"), SHOWN, ids=[file for file, _ in SHOWN])
def test_files_are_shown_as_they_are(file: str, text: str) -> None:
    assert text == (ROOT / file).read_text("utf-8")


def test_two_algorithms_are_shown() -> None:
    assert [Path(file).parent.name for file, _ in SHOWN] == ["algos", "algos"]


def test_the_table_names_what_the_example_has() -> None:
    names = set(re.findall(r"^\| `(\w+)[(`]", PAGE, re.MULTILINE))
    algo = load_algo("rloo")
    assert names <= set(vars(algo))
    assert {"TRAINS", "Hyper", "check", "scored_by", "trains", "prepare", "LOSSES"} == names
    for name in ("check", "scored_by", "trains", "prepare"):
        (arguments,) = re.findall(rf"^\| `{name}\((.*?)\)`", PAGE, re.MULTILINE)
        assert arguments.split(",")[0] == ("rollout" if name == "prepare" else "hyper")
        assert len(arguments.split(",")) == len(inspect.signature(getattr(algo, name)).parameters)


def test_every_file_that_is_named_exists() -> None:
    for name in re.findall(r"`((?:yatt_jax|tests|configs|tools)/[\w/]+\.py)`", PAGE):
        assert "NAME" in name or (ROOT / name).exists(), name


def test_the_numbers_of_the_example() -> None:
    import jax.numpy as jnp

    from yatt_jax.ops.groups import Advantage, group_advantages

    found = group_advantages(
        jnp.array([1.0, 0, 0, 3]), jnp.zeros(4, jnp.int32), jnp.ones(4), Advantage("leave_one_out", scale="none")
    )
    assert [round(float(x) * 3) for x in found] == [0, -4, -4, 8]
    assert "rewards 1, 0, 0, 3 of one group are 0, -4/3, -4/3, 8/3" in PAGE


def test_the_reward_works(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def brevity" in text]
    module = types.ModuleType("my_rewards")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    prompt = Prompt([], "question", [1], {}, "p.jsonl:1", 0)
    samples = [Sample(prompt, "x" * length, [1], "stop", 0, 0) for length in (10, 120, 200)]
    scorer = build({"brevity": RewardSpec("my_rewards:brevity", kwargs={"limit": 80})})
    assert scorer(samples).total.tolist() == [1.0, 0.5, 0.0]
