"""The model card states what the model is and how it came to be."""

from __future__ import annotations

import json

import pytest

from yatt_jax.io.export import save_folder
from yatt_jax.io.model_card import model_card, run_card
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import to_hf

CONFIG = DecoderConfig(vocab=12, hidden=16, layers=1, heads=2, kv_heads=2, head_dim=8, mlp=24)
RUN = {
    "config": {
        "algo": "ppo",
        "steps": 4,
        "model": {"path": "models/base"},
        "data": {"train": [{"path": "a.jsonl", "weight": 2.0}], "eval": ["b.jsonl"], "holdout": 0, "system": ""},
        "rewards": {"length": {"fn": "rules:length", "weight": 1.0, "kwargs": {}}},
    },
    "command": "python -m yatt_jax.main --config=c.py",
    "started": "2026-01-02T03:04:05+00:00",
    "versions": {"python": "3.11.9", "jax": "0.10.2"},
    "devices": {"count": 8, "kind": "TPU v5e", "platform": "tpu", "processes": 2},
}
LINES = [
    {"step": 0, "rollout/reward": 0.25, "eval/reward": 0.125, "time/train": 3.0},
    {"step": 1, "rollout/reward": 0.5, "rollout/bad": None, "time/train": 3.0},
    {"step": 2, "rollout/reward": 0.75, "time/train": 3.0},
]


@pytest.fixture
def model() -> Model:
    return build("lm", CONFIG)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RUN))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 3, "roll')
    return folder


def test_run_card(run, tmp_path):
    found = run_card(run)
    assert {key: found[key] for key in RUN} == RUN
    assert found["step"] == 2
    assert found["metrics"] == {"rollout/reward": (0.75, 2), "eval/reward": (0.125, 0), "time/train": (3.0, 2)}
    earlier = run_card(run, 1)
    assert earlier["step"] == 1
    assert earlier["metrics"]["rollout/reward"] == (0.5, 1)
    assert run_card(tmp_path / "none") == {"step": None, "metrics": {}}


def test_everything_is_stated(model, run):
    text = model_card("mine", model, to_hf("llama", CONFIG), "bfloat16", run_card(run))
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert head.splitlines() == [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- yatt_jax",
        "- llama",
        "- ppo",
    ]
    assert body.startswith(
        "\n# mine\n\nA llama language model of 0.0 M parameters, stored as bfloat16, trained with ppo"
    )
    for line in (
        "- started from: models/base",
        "- command: `python -m yatt_jax.main --config=c.py`",
        "- devices: 8 x TPU v5e, 2 processes",
        "- reward: length: fn rules:length, weight 1.0",
        "- train: path a.jsonl, weight 2.0",
        "- eval: b.jsonl",
        "- jax 0.10.2",
        "| eval/reward | 0.125 | 0 |",
        "| rollout/reward | 0.75 | 2 |",
    ):
        assert f"\n{line}\n" in body
    assert "time/train" not in text
    assert body.index("eval/reward") < body.index("rollout/reward")
    fenced = body.rpartition("```json\n")[2].partition("\n```")[0]
    assert json.loads(fenced) == RUN["config"]


@pytest.mark.parametrize(
    ("kind", "task", "loader"),
    [
        ("lm", "text-generation", "AutoModelForCausalLM"),
        ("value", "token-classification", "AutoModelForTokenClassification"),
        ("reward", "text-classification", "AutoModelForSequenceClassification"),
    ],
)
def test_kinds(kind, task, loader):
    text = model_card("m", build(kind, CONFIG), to_hf("llama", CONFIG), "float32")
    assert f"pipeline_tag: {task}\n" in text
    assert f"model = {loader}.from_pretrained(FOLDER)" in text
    assert "## " not in text  # nothing is known of a run
    gemma = model_card("m", build("value", CONFIG), {"model_type": "gemma3_text"}, "float32")
    assert "no class for it" in gemma


def test_it_is_written(model, tmp_path, one_device):
    params = model.init(0, one_device)
    out = save_folder(tmp_path / "mine", model, params, to_hf("llama", CONFIG), None, run=RUN)
    assert (out / "README.md").read_text() == model_card("mine", model, to_hf("llama", CONFIG), "bfloat16", RUN)
