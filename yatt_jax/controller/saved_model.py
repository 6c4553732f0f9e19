"""Models of saved runs: which run and step is meant, and one role's weights out of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from yatt_jax import config as configuration
from yatt_jax.controller.plan import make_plan
from yatt_jax.errors import InputError
from yatt_jax.io import checkpoint_files, checkpoint_read
from yatt_jax.io.hf import read_folder
from yatt_jax.io.model_card import run_card
from yatt_jax.models.build import Model
from yatt_jax.parallel.partition import Partition
from yatt_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Source:
    """A model with everything that its folder holds.

    Attributes:
      hf_config: its config.json.
      generation_config: its generation_config.json, if it has one.
      run: what the model card says of its training.
    """

    model: Model
    params: Params
    hf_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Mapping[str, Any] | None
    run: Mapping[str, Any] | None = None


def run_of(source: str) -> tuple[Path, int | None] | None:
    """The run directory and the step that ``RUN_DIR[@STEP]`` means; None where it is no run directory."""
    match = re.fullmatch(r"(.+)@(\d+)", source)
    path, step = (Path(match[1]), int(match[2])) if match and not Path(source).exists() else (Path(source), None)
    head, at, tail = source.rpartition("@")
    if at and not match and not path.exists() and (Path(head) / "config.json").is_file():
        raise InputError(f"{source}: @{tail} is no step; name one of the run's checkpoints, as {head}@100")
    file = path / "config.json"
    if file.is_file() and "model_type" not in (values := _read_json(file)) and "config" in values:
        return path, step
    if step is not None:
        raise InputError(f"{source}: {path} is not a run directory: it has no config.json of a run")
    return None


def from_run(run: Path, step: int | None, role: str | None, partition: Partition) -> Source:
    """A role of a run, as a checkpoint has it.

    Args:
      run: the run directory.
      step: of the checkpoint; None: the newest that is whole.
      role: "actor", "critic" or "reward"; None: the one that the run exports.
      partition: where the parameters go.

    Raises:
      InputError: no such checkpoint, a damaged one, or a run whose config or model folder can no longer be read.
    """
    values = _read_json(run / "config.json")["config"]
    config = configuration.parse(values)
    trained = configuration.load_algo(config.algo).TRAINS
    wanted = role or ("actor" if "actor" in trained else trained[0])
    if wanted not in trained:
        raise InputError(f"{run}: {config.algo} trains no {wanted}")
    # Checkpoints are read into any sharding: that of the run may not fit the devices here.
    plan = make_plan(dataclasses.replace(config, parallel=type(config.parallel)()))
    model = plan.models[wanted]
    named = (values.get("checkpoint") or {}).get("folder")
    folder = checkpoint_files.open_folder(named or run / "checkpoints", create=False)
    found = checkpoint_read.find(folder, step)
    if found is None:
        raise InputError(f"{folder}: no checkpoint; a run saves them as config.checkpoint says")
    params = _read_role(found, wanted, model, partition)
    hf_config = read_folder(plan.paths[wanted]).hf_config if plan.paths[wanted] else plan.hf_config
    return Source(model, params, hf_config, plan.tokenizer, plan.generation_config, run_card(run, found.step))


def _read_role(found: checkpoint_read.Found, role: str, model: Model, partition: Partition) -> Params:
    """Reads the parameters of a role and nothing else of the checkpoint."""
    place = f"{role}.params"
    where = next((name.partition(place)[0] + place for name in found.arrays if f".{place}." in f".{name}"), None)
    if where is None:
        raise InputError(f"{found.path}: holds no parameters of the {role}")
    like: Any = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract,
        model.shardings(partition),
    )
    keys = where.split(".")
    for key in reversed(keys):
        like = {key: like}
    read = checkpoint_read.restore(found, like, partial=True)
    for key in keys:
        read = read[key]
    return read


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
