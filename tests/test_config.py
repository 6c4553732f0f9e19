from __future__ import annotations

import dataclasses

import pytest

from yatt_jax.config import Config, ConfigError, default_config, load_algo, parse, to_dict


def valid():
    config = default_config("ppo")
    config.rewards = {"length": {"fn": "yatt_jax.rewards.rules:length"}}
    return config


def test_defaults_parse_and_round_trip() -> None:
    config = parse(valid())
    assert isinstance(config, Config)
    assert config.hyper == load_algo("ppo").Hyper()
    assert parse(to_dict(config)) == config


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("stepz", 3, r"config.stepz: unknown key \(did you mean 'steps'\?\)"),
        ("rollout.sampling.temprature", 1.0, r"temprature: unknown key \(did you mean 'temperature'\?\)"),
        ("hyper.clip.hihg", 0.2, r"config.hyper.clip.hihg: unknown key \(did you mean 'high'\?\)"),
        ("steps", "many", r"config.steps = 'many': expected int, got str"),
        ("steps", True, r"config.steps = True: expected int, got bool"),
        ("steps", 1.5, r"config.steps = 1.5: expected int, got float"),
        ("steps", 0, r"steps = 0: must be at least 1"),
        ("model.dtype", "float23", r"config.model.dtype = 'float23' \(did you mean 'float32'\?\)"),
        ("hyper.gamma", 1.5, r"gamma = 1.5"),
        ("hyper.gamma", float("nan"), r"config.hyper.gamma is NaN"),
        ("rollout.sampling.top_p", 0.0, r"top_p = 0.0"),
        ("rollout.sampling.temperature", 0.0, r"temperature = 0 \(greedy\) explores nothing"),
        ("rollout", 3, r"config.rollout = 3: expected keys of RolloutConfig"),
        ("rewards", {}, r"rewards: empty"),
        ("model.init.heads", 3, r"kv_heads = 2 must divide heads = 3"),
        ("algo", "ppoo", r"algo = 'ppoo': no such algorithm \(did you mean 'ppo'\?\)"),
    ],
)
def test_a_bad_value_is_named(path: str, value: object, words: str) -> None:
    raw = to_dict(parse(valid()))
    *parents, last = path.split(".")
    place = raw
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(ConfigError, match=words):
        parse(raw)


def test_every_fault_is_listed_at_once() -> None:
    raw = to_dict(parse(valid()))
    raw["stepz"] = 1
    raw["hyper"]["gama"] = 1
    with pytest.raises(ConfigError) as error:
        parse(raw)
    assert "stepz" in str(error.value)
    assert "gama" in str(error.value)


def test_an_integer_serves_as_a_float_and_one_path_as_a_list() -> None:
    raw = to_dict(parse(valid()))
    raw["hyper"]["gamma"] = 1
    raw["data"]["eval"] = "held_out.jsonl"
    raw["data"]["train"] = "train.jsonl"
    config = parse(raw)
    assert config.hyper.gamma == 1.0
    assert config.data.eval == ("held_out.jsonl",)
    assert config.data.train[0].path == "train.jsonl"


def test_config_files_cannot_hold_a_key_the_schema_lacks() -> None:
    config = valid()
    config.rollout.speed = "fast"
    with pytest.raises(ConfigError, match=r"config.rollout.speed: unknown key"):
        parse(config)


def test_the_dataclasses_are_frozen() -> None:
    config = parse(valid())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # type: ignore[misc]
