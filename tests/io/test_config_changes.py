"""What may change between one start of a run and the next, and what may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from yatt_jax.config import OnlineRun, default_config, to_dict
from yatt_jax.io.config_changes import _FIXED, ABSENT, Change, compare, refused, shown
from yatt_jax.rewards import RewardSpec


def test_compare() -> None:
    old = {"a": {"b": 1, "c": [1, 2], "gone": None}, "list": [{"path": "x"}, {"path": "y"}], "same": 0.1, "empty": {}}
    new = {"a": {"b": 1.5, "c": (1, 2)}, "list": ({"path": "x"},), "same": 0.1, "empty": {}, "more": {"d": "text"}}
    changes = compare(old, new)
    assert changes == [
        Change("a.b", 1, 1.5),
        Change("a.gone", None, ABSENT),
        Change("list[1].path", "y", ABSENT),
        Change("more.d", ABSENT, "text"),
    ]
    assert shown(changes).splitlines()[0] == "  config.a.b: 1 -> 1.5"
    assert shown(changes).splitlines()[3] == '  config.more.d: (absent) -> "text"'


def test_a_config_is_that_which_was_saved() -> None:
    config = to_dict(OnlineRun(rewards={"length": RewardSpec(fn="yatt_jax.rewards.rules:length")}))
    assert compare(json.loads(json.dumps(config)), config) == []


def change(key: str, value: Any) -> list[Change]:
    """What ``compare`` says when a default configuration is given this value."""
    config = default_config("ppo")
    config.data.train = ["a.jsonl"]
    before = json.loads(config.to_json())
    node, *rest = key.split(".")
    branch = config
    for name in rest:
        branch, node = branch[node], name
    with config.ignore_type():
        branch[node] = value
    found = compare(before, json.loads(config.to_json()))
    assert found, f"{key} is {value} by default"
    return found


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algo", "grpo", 'config.algo: "ppo" -> "grpo": another algorithm'),
        ("seed", 1, "config.seed: 0 -> 1: sampling and the order"),
        ("model.path", "other", "belong to the model"),
        ("model.init.layers", 7, "config.model.init.layers: 2 -> 7: the saved weights"),
        ("model.dtype", "bfloat16", "belong to the model"),
        ("model.frozen_dtype", "bfloat16", "reference"),
        ("model.reference", "other", "reference"),
        ("data.train", ["b.jsonl"], "order of the data"),
        ("data.train", ["a.jsonl", "b.jsonl"], "order of the data"),
        ("data.holdout", 4, "order of the data"),
        ("rollout.prompts", 5, "numbers of prompts"),
        ("rollout.samples_per_prompt", 5, "numbers of prompts"),
        ("actor_optimizer.name", "sgd", "another optimizer"),
        ("critic_optimizer.clip_norm", 0.0, "a part more or less"),
        ("actor_optimizer.weight_decay", 0.1, "a part more or less"),
    ],
)
def test_refused(key: str, value: Any, message: str) -> None:
    (found,) = refused(change(key, value))
    assert message in found
    assert found.startswith(f"config.{key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 7),
        ("actor_optimizer.lr", 1e-3),
        ("actor_optimizer.clip_norm", 0.5),
        ("actor_optimizer.schedule", "constant"),
        ("rollout.sampling.max_new_tokens", 7),
        ("rollout.rows", 4),
        ("data.max_prompt_tokens", 7),
        ("hyper.gamma", 0.5),
        ("parallel.train.fsdp", 2),
        ("train.micro_rows", 3),
        ("model.compute_dtype", "bfloat16"),
        ("checkpoint_of_a_later_version", 1),
        ("seeds", 1),
    ],
)
def test_allowed(key: str, value: Any) -> None:
    assert refused(change(key, value)) == []


def test_every_key_of_the_table_exists() -> None:
    every = [json.loads(default_config(algo).to_json()) for algo in ("ppo", "sft")]
    for key in _FIXED:
        assert any(_has(known, key) for known in every), key


def _has(known: Any, key: str) -> bool:
    for name in key.split("."):
        if name not in known:
            return False
        known = known[name]
    return True
