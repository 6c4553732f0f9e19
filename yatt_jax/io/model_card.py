"""The model card of an export: what the model is, and how it came to be, as README.md of the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from yatt_jax.models.build import Kind, Model
from yatt_jax.models.families import FAMILIES
from yatt_jax.report.rundir import log_files, read_log

_WHAT: Mapping[Kind, str] = {"lm": "language model", "value": "critic", "reward": "reward model"}
_TASK: Mapping[Kind, str] = {"lm": "text-generation", "value": "token-classification", "reward": "text-classification"}
_CLASS: Mapping[Kind, str] = {
    "lm": "AutoModelForCausalLM",
    "value": "AutoModelForTokenClassification",
    "reward": "AutoModelForSequenceClassification",
}


def run_card(run: Path, step: int | None = None) -> dict[str, Any]:
    """What a run directory says about a model of it, for ``model_card``.

    Args:
      run: the run directory.
      step: steps that the model was trained for: metrics of later ones are left out; None: all.

    Returns:
      What config.json of the run holds ("config", "command", "started", "versions", "devices", "parameters"), "step",
      and "metrics": name -> (the last value, its step).
    """
    found: dict[str, Any] = {}
    file = run / "config.json"
    if file.is_file():
        found |= json.loads(file.read_text(encoding="utf-8"))
    metrics: dict[str, tuple[float, int]] = {}
    last = None
    for line in (line for _, log in log_files(run, "metrics") for line in read_log(log)):
        if step is not None and line["step"] > step:
            continue
        last = line["step"]
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step" and math.isfinite(value):
                metrics[name] = (value, last)
    return found | {"step": last if step is None else step, "metrics": metrics}


def model_card(
    name: str, model: Model, hf_config: Mapping[str, Any], dtype: str, run: Mapping[str, Any] | None = None
) -> str:
    """README.md of an exported folder.

    Args:
      name: of the model.
      model: what is exported.
      hf_config: its config.json.
      dtype: of the tensors in the files.
      run: as ``run_card`` gives it; every part may be missing. None: only the model is described.
    """
    run = run or {}
    config = run.get("config") or {}
    algorithm = config.get("algo")
    family = str(hf_config.get("model_type"))
    tags = ["yatt_jax", family, *([str(algorithm)] if algorithm else [])]
    parts = [
        "\n".join(["---", "library_name: transformers", f"pipeline_tag: {_TASK[model.kind]}", "tags:"]),
        *(f"- {tag}" for tag in tags),
        "---",
        "",
        f"# {name}",
        "",
        f"A {family} {_WHAT[model.kind]} of {model.parameter_count / 1e6:,.1f} M parameters, stored as {dtype}"
        + (f", trained with {algorithm}" if algorithm else "")
        + (f" for {run['step']} step{'' if run['step'] == 1 else 's'}" if run.get("step") is not None else "")
        + ".",
        "",
        *_usage(model, family),
    ]
    for heading, lines in (
        ("Training", list(_training(run, config))),
        ("Data", list(_data(config))),
        ("Metrics", list(_metrics(run.get("metrics") or {}))),
        ("Versions", [f"- {package} {version}" for package, version in (run.get("versions") or {}).items()]),
        ("Configuration", _block("json", json.dumps(config, indent=2, ensure_ascii=False)) if config else []),
    ):
        if lines:
            parts += ["", f"## {heading}", "", *lines]
    return "\n".join(parts) + "\n"


def _block(language: str, text: str) -> list[str]:
    fence = "```" if "```" not in text else "`````"
    return [f"{fence}{language}", text, fence]


def _usage(model: Model, model_type: str) -> list[str]:
    known = FAMILIES.get(model_type)
    if known and model.kind in known.not_stock:
        return ["transformers has no class for it; `yatt_jax.io.hf.load_model` reads it."]
    towers = model.config.vision or model.config.audio
    name = known.architectures[model.kind] if known and towers else _CLASS[model.kind]
    code = [f"from transformers import {name}, AutoTokenizer", ""]
    code += [f"model = {name}.from_pretrained(FOLDER)", "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"]
    return _block("python", "\n".join(code))


def _training(run: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    start = (config.get("model") or {}).get("path")
    if start:
        yield f"- started from: {start}"
    if run.get("command"):
        yield f"- command: `{run['command']}`"
    if run.get("started"):
        yield f"- began: {run['started']}"
    devices = run.get("devices") or {}
    if devices:
        count, kind, processes = (devices.get(key) for key in ("count", "kind", "processes"))
        yield f"- devices: {count} x {kind}, {processes} process{'' if processes == 1 else 'es'}"
    for reward in _records(config.get("rewards")):
        yield f"- reward: {_words(reward)}"


def _data(config: Mapping[str, Any]) -> Iterator[str]:
    data = config.get("data") or {}
    for use in ("train", "eval"):
        for source in _records(data.get(use)):
            yield f"- {use}: {_words(source)}"
    rest = {key: value for key, value in data.items() if key not in ("train", "eval")}
    yield from (f"- {key}: {_words(value)}" for key, value in rest.items() if value not in ("", None, {}, []))


def _records(value: Any) -> Sequence[Any]:
    """Entries of a list, or of a mapping with the name of each put first."""
    if isinstance(value, Mapping):
        return [f"{name}: {_words(entry)}" for name, entry in value.items()]
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value] if value else []


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(entry)}" for key, entry in value.items() if entry not in ("", None, {}, []))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _metrics(metrics: Mapping[str, tuple[float, int]]) -> Iterator[str]:
    """A table; evaluations first, times left out."""
    names = sorted((name for name in metrics if not name.startswith("time/")), key=lambda n: not n.startswith("eval/"))
    if names:
        yield from ("| metric | value | step |", "|---|---|---|")
    for name in names:
        value, step = metrics[name]
        yield f"| {name} | {value:.6g} | {step} |"
