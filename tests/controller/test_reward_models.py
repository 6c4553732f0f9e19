"""Reward models on the mesh: transformers scores the same texts alike, and they reward runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from tests.controller import test_processes as processes
from tests.controller import tiny
from tests.controller.test_run import lines, plan_on, run
from yatt_jax.config import ConfigError, InitConfig, parse
from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online_job import OnlineJob
from yatt_jax.controller.reward_models import RewardModel, TextScorer, plan_reward_models
from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.errors import InputError, RunFailure
from yatt_jax.io import hf
from yatt_jax.io.export import save_folder
from yatt_jax.models import families
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.rewards import Invalid, ModelReward, RewardSpec
from yatt_jax.rewards.model import Marked, SampleReader
from yatt_jax.types import Prompt, Sample

ACTOR = load_tokenizer(f"characters:{tiny.ALPHABET}")
COMPUTE = {"dtype": "float32", "remat": "none", "attention": "auto"}


def save(folder: Path, partition: Partition, alphabet: str = tiny.ALPHABET, labels: int = 1) -> str:
    """A random reward model as a folder."""
    tokenizer = load_tokenizer(f"characters:{alphabet}")
    sizes = InitConfig(hidden=32, mlp=64)
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp")
    config = DecoderConfig(vocab=len(tokenizer), **{name: getattr(sizes, name) for name in names})
    model = build("reward", config, labels=labels)
    written = families.to_hf("llama", config, 64) | {"eos_token_id": 0, "pad_token_id": None}
    save_folder(folder, model, model.init(5, partition), written, tokenizer, dtype="float32")
    return str(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, one_device: Partition) -> Callable[..., str]:
    """Saves (once) a reward model with such settings."""
    made: dict[str, str] = {}

    def get(**settings: Any) -> str:
        key = json.dumps(settings, sort_keys=True)
        if key not in made:
            made[key] = save(tmp_path_factory.mktemp("reward") / "model", one_device, **settings)
        return made[key]

    return get


@functools.cache
def torch_model(path: str) -> Any:
    """The model as transformers loads it, once."""
    return transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()


def by_torch(path: str, tokens: list[int]) -> np.ndarray:
    """All outputs at every token, by transformers."""
    model = torch_model(path)
    with torch.no_grad():
        return model.score(model.model(torch.tensor([tokens])).last_hidden_state)[0].numpy()


def texts(count: int) -> list[Marked]:
    dice = np.random.default_rng(count)
    found = [dice.integers(0, 9, dice.integers(2, 15)).astype(np.int32) for _ in range(count)]
    return [Marked(tokens, (len(tokens) - 1,)) for tokens in found]


def scorer(path: str, split: Split, devices: int, steps: Any = "", rows: int = 8) -> tuple[Any, TextScorer]:
    train, _ = make_partitions(split, Split(), jax.devices()[:devices])
    model, params = hf.load_model(path, "reward", train)
    return params, TextScorer(model, train, Hosts(), rows=rows, max_tokens=14, budget=40, steps=steps)


@pytest.mark.parametrize(
    ("devices", "split", "count"), [(1, Split(), 19), (8, Split(2, 2, 2), 19), (8, Split(8, 1, 1), 3), (1, Split(), 0)]
)
def test_transformers_scores_the_same_texts_alike(saved, devices: int, split: Split, count: int) -> None:
    """More of them than are scored at a time, or fewer than devices, or none."""
    path = saved(labels=2)
    params, score = scorer(path, split, devices)
    found = score(params, texts(count))
    assert found.shape == (count, 2)
    for row, text in zip(found, texts(count), strict=True):
        np.testing.assert_allclose(row, by_torch(path, text.tokens.tolist())[-1], atol=1e-5)


def test_steps_are_read_where_they_end(saved) -> None:
    path = saved()
    params, score = scorer(path, Split(), 1, steps="product")
    text = Marked(np.array([1, 2, 9, 3, 4, 9, 5], np.int32), (1, 4, 6))
    outputs = by_torch(path, text.tokens.tolist())[[1, 4, 6], 0]
    np.testing.assert_allclose(score(params, [text]), [[np.prod(1 / (1 + np.exp(-outputs)))]], rtol=1e-5)


def sample(prompt: Any, completion: str, finish: str = "stop") -> Sample:
    """A sample of the tiny actor."""
    text = prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)
    ids = ACTOR(text)["input_ids"]
    tokens = ACTOR(completion)["input_ids"] + ([0] if finish == "stop" else [])
    messages = [] if isinstance(prompt, str) else prompt
    return Sample(Prompt(messages, text, ids, {}, "p.jsonl:1", 0), completion, tokens, finish, 0, 0)


def test_a_sample_as_text_has_the_tokens_that_it_has_as_ids() -> None:
    samples = [sample("ab c", "da"), sample("a", "b b")]
    ids = SampleReader(ModelReward("m"), None, 20).read(samples)
    text = SampleReader(ModelReward("m"), ACTOR, 20).read(samples)
    assert [(r.tokens.tolist(), r.read) for r in ids] == [(r.tokens.tolist(), r.read) for r in text]  # type: ignore[union-attr]


def test_the_ends_of_steps_are_found() -> None:
    (found,) = SampleReader(ModelReward("m", steps="min", step_separator=" "), ACTOR, 20).read([sample("ab", "cd e f")])
    assert isinstance(found, Marked)
    assert found.tokens.tolist() == [*ACTOR("abcd e f")["input_ids"], 0]
    assert found.read == (3, 5, 7)


def test_what_cannot_be_read_is_invalid() -> None:
    too_long = sample("ab", "c" * 30)
    assert SampleReader(ModelReward("m"), None, 20).read([too_long]) == [
        Invalid("a text of more than model.max_tokens = 20 tokens")
    ]
    assert SampleReader(ModelReward("m"), ACTOR, 20).read([too_long, sample("ab", "")]) == [
        Invalid("a text of more than model.max_tokens = 20 tokens"),
        Invalid("not readable as text"),
    ]


def test_an_answer_that_goes_on_with_a_turn_is_one_turn() -> None:
    begun = sample([{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c "}], "d")
    tokenizer = load_tokenizer(f"characters:{tiny.ALPHABET}")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (found,) = SampleReader(ModelReward("m"), tokenizer, 20).read([begun])
    assert isinstance(found, Marked)
    assert found.tokens.tolist() == [*ACTOR("abc d")["input_ids"], 0]


def plan(path: str, vocab: int = 10, **settings: Any) -> Any:
    rewards = {"rm": RewardSpec(model=ModelReward(path, **settings))}
    return plan_reward_models(rewards, ACTOR, vocab, 14, param_dtype="float32", compute=COMPUTE)["rm"]


def test_the_same_vocabulary_is_scored_by_ids_and_another_one_as_text(saved) -> None:
    assert plan(saved()).tokenizer is None
    assert plan(saved(), tokens="text").tokenizer is not None
    assert plan(saved(), steps="min").tokenizer is not None
    assert plan(saved(alphabet="abc ")).tokenizer is not None
    assert (plan(saved()).max_tokens, plan(saved(), tokens="text", max_tokens=30).max_tokens) == (14, 30)


@pytest.mark.parametrize(
    ("settings", "made", "message"),
    [
        ({"tokens": "ids"}, {"alphabet": "abc "}, "has 5 entries and the actor's 10"),
        ({}, {"labels": 2}, r"rewards\.rm\.model: weights is empty, and the head of .* has 2 outputs"),
        ({"weights": (1.0, 2.0)}, {}, "weights has 2 numbers, and the head of .* has 1 outputs"),
    ],
)
def test_a_model_that_does_not_fit_its_settings(saved, settings: Any, made: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(saved(**made), **settings)


def test_a_language_model_is_no_reward_model(tmp_path: Path, one_device: Partition) -> None:
    config = DecoderConfig(vocab=10, hidden=32, layers=1, heads=2, kv_heads=2, head_dim=16, mlp=32)
    model = build("lm", config)
    save_folder(tmp_path / "lm", model, model.init(0, one_device), families.to_hf("llama", config, 64), ACTOR)
    with pytest.raises(InputError, match="holds a language model and no score for a text"):
        plan(str(tmp_path / "lm"))
    with pytest.raises(InputError, match="no such folder"):
        plan(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fn": "a.b:c", "model": "x"}, "model and fn: a reward is a function or a model"),
        ({"model": "x", "chunk": 2}, "model and chunk"),
        ({"model": {"path": "x", "weights": (0.0,)}}, "not all 0"),
        ({"model": {"path": "x", "steps": "min", "weights": (1.0,)}}, "steps and weights"),
        ({"model": {"path": "x", "steps": "min", "tokens": "ids"}}, "steps are found in the text"),
        ({"model": {"path": "x", "steps": "least"}}, "expected one of"),
        ({"model": "x", "reference": 1}, "at least 2"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tiny.config(tmp_path, rewards={"rm": given}))


def test_outputs_are_weighted(saved, one_device: Partition) -> None:
    path = saved(labels=2)
    planned = plan(path, weights=(0.5, -2.0))
    params, score = scorer(path, Split(), 1)
    one = sample("ab c", "da")
    expected = by_torch(path, [*one.prompt.tokens, *one.tokens])[-1] @ [0.5, -2.0]
    (found,) = RewardModel(planned, score, lambda: params)([one])
    assert isinstance(found, float)
    assert abs(found - expected) < 1e-5


REWARDS = {"share_of_a": {"fn": "tests.controller.tiny:share_of_a", "weight": 0.5}}


def test_a_run_is_rewarded_by_models_and_functions(tmp_path: Path, saved) -> None:
    path = saved()
    rewards: Any = REWARDS | {"rm": {"model": path, "reference": 9, "weight": 2.0}}
    run(tmp_path, rewards=rewards, reward_workers=2, parallel__park="all", report__export=False)
    written = [s for s in lines(tmp_path / "run" / "samples.jsonl")]
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    (mean,) = {m["rollout/reference_mean/rm"] for m in metrics[:1]}
    (deviation,) = {m["rollout/reference_std/rm"] for m in metrics[:1]}
    assert {"eval/reward/rm", "eval/reward/share_of_a"} <= metrics[0].keys()
    assert {"rollout/reward/rm", "rollout/reward_invalid/rm"} <= metrics[1].keys()
    for one in written:
        tokens = ACTOR(one["prompt"] + one["completion"])["input_ids"] + [0] * (one["finish"] == "stop")
        expected = by_torch(path, tokens)[-1, 0]
        assert abs(one["rewards"]["rm"] - expected) < 1e-4
        total = 0.5 * one["rewards"]["share_of_a"] + 2.0 * (expected - mean) / deviation
        assert abs(one["total"] - total) < 1e-3


@pytest.mark.slow
def test_a_resumed_run_keeps_its_scale(tmp_path: Path, saved) -> None:
    rewards: Any = {"rm": {"model": saved(), "reference": 9}}
    changes: dict[str, Any] = {"rewards": rewards, "report__export": False, "evaluation__every": 0}
    run(tmp_path, steps=1, **changes)
    with OnlineJob(plan_on(tmp_path, 1, steps=2, **changes), tmp_path / "run") as job:
        assert job.resumed
        kept = job.scorer.scales["rm"]
    with OnlineJob(plan_on(tmp_path, 1, steps=2, **changes), tmp_path / "other") as job:
        assert job.scorer.scales["rm"] == kept
    changed = changes | {"rewards": rewards | {"more": {"fn": "tests.controller.tiny:share_of_a", "reference": 4}}}
    with pytest.raises(InputError, match=r"config\.rewards\.more\.reference was 0 when the run was saved"):
        OnlineJob(plan_on(tmp_path, 1, steps=2, **changed), tmp_path / "run")


@pytest.mark.slow
def test_the_same_run_for_several_processes(tmp_path: Path, saved) -> None:
    """One of which has no held-out prompt, and less to score in a step than the other."""
    rewards: Any = REWARDS | {
        "rm": {"model": saved(), "reference": 9},
        "text": {"model": {"path": saved(), "tokens": "text"}},
    }
    changes: dict[str, Any] = {"rewards": rewards, "rollout__prompts": 3, "hyper__minibatches": 1, "data__holdout": 1}
    one = processes.run(tmp_path / "one", 1, 1, **changes)
    two = processes.run(tmp_path / "two", 2, 2, parallel__train__fsdp=2, **changes)
    for a, b in zip(one[0], two[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert [sample[:5] for sample in one[1]] == [sample[:5] for sample in two[1]]
    ours, theirs = (np.array([sample[5] for sample in found[1]], float) for found in (one, two))  # none: not judged
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.isfinite(ours).sum() > 2


def test_a_reward_that_is_the_same_everywhere_has_no_scale(tmp_path: Path) -> None:
    rewards: Any = {"one": {"fn": "tests.controller.test_reward_models:always_one", "reference": 4}}
    with pytest.raises(RunFailure, match=r"rewards\.one\.reference = 4: 4 responses .* deviation of 0"):
        run(tmp_path, rewards=rewards)


def always_one(samples: list[Any]) -> list[float]:
    """The same for all."""
    return [1.0] * len(samples)
