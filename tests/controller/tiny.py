"""A tiny job for the tests of the loop: a model from scratch, a character tokenizer, a reward by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from yatt_jax.config import default_config, parse
from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.controller.plan import make_plan

ALPHABET = "abcdefgh "


def config(folder: Path, **changes: Any) -> ConfigDict:
    """A config whose run takes seconds; ``changes`` are dotted keys with ``__`` for the dots, and ``algo``."""
    data = folder / "prompts.jsonl"
    if not data.exists():
        rows = [
            {"prompt": f"{a}{b} {c}", "answer": c, "completion": c + b} for a in "abcd" for b in "efgh" for c in "ab"
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = default_config(changes.pop("algo", "ppo"))
    made.model.tokenizer = f"characters:{ALPHABET}"
    made.model.init.hidden = 32
    made.model.init.mlp = 64
    made.data.train = (str(data),)
    made.data.holdout = 4
    made.data.max_prompt_tokens = 8
    made.rollout.prompts = 6
    made.rollout.sampling.max_new_tokens = 6
    made.rewards = {"share_of_a": {"fn": "tests.controller.tiny:share_of_a"}}
    made.hyper.epochs = 1
    made.steps = 2
    made.seed = 3
    made.evaluation.every = 2
    made.actor_optimizer.lr = 1e-2
    made.actor_optimizer.warmup_steps = 0
    made.critic_optimizer.lr = 1e-2
    made.report.tensorboard = False
    made.compilation_cache = ""
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = made
        for parent in parents:
            place = place[parent]
        place[last] = value
    return made


def plan(made: ConfigDict) -> OnlinePlan:
    """The plan of such a config."""
    found = make_plan(parse(made))
    assert isinstance(found, OnlinePlan)
    return found


def share_of_a(samples: list[Any]) -> list[float]:
    """How much of a completion is the letter a."""
    return [s.completion.count("a") / max(len(s.tokens), 1) for s in samples]


def fails_on_b(samples: list[Any]) -> list[float]:
    """Raises for completions that hold the letter b."""
    if any("b" in sample.completion for sample in samples):
        raise RuntimeError("there is a b")
    return [1.0] * len(samples)
