"""The configuration: a typed tree of frozen dataclasses, and its ConfigDict form that users edit.

Config files return a ``ConfigDict`` made by ``default_config``; ``parse`` turns it into ``OnlineRun`` or ``OfflineRun``
strictly: every key must exist (an unknown one is reported with the nearest name), every value must have the field's
type, and each dataclass checks its own ranges. Below ``main`` nothing reads a ConfigDict.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from yatt_jax.controller.eval_config import EvalConfig, PromptsEvalConfig, RowsEvalConfig
from yatt_jax.controller.hosts import ControllerConfig
from yatt_jax.controller.optimizer import OptimizerConfig
from yatt_jax.controller.parking import Parked
from yatt_jax.data.config import DataConfig
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.errors import InputError, nearest
from yatt_jax.io.checkpoint_config import CheckpointConfig
from yatt_jax.parallel.partition import Split
from yatt_jax.rewards import RewardSpec
from yatt_jax.rollout.config import RolloutConfig
from yatt_jax.typed import from_dict, to_dict


class ConfigError(InputError):
    """A configuration that cannot run; the message lists every fault with its key."""


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Sizes of a model made from scratch, used when ``model.path`` is empty. The vocabulary is the tokenizer's."""

    family: str = "llama"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    tied: bool = True
    max_positions: int = 512

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Where the models come from.

    Attributes:
      path: folder in Hugging Face format, or a GGUF file, that the actor starts from; empty: from scratch by ``init``.
      tokenizer: folder, GGUF file, or ``characters:ALPHABET``; empty: the one in ``path``.
      reference: what the frozen reference is; empty: a copy of the actor at the start.
      critic: what the critic starts from; empty: the actor at the start, with a value head of zeros.
      teacher: the frozen model that distillation learns from.
      init: sizes when there is no ``path``.
      dtype: of the parameters and optimizer moments.
      compute_dtype: of activations and matrix products.
      frozen_dtype: of the parameters of reference and teacher.
      remat: "full" recomputes each layer in the backward pass, "none" keeps its activations.
      attention: "auto" is the quickest form that the devices have, "plain" the one without kernels.
    """

    path: str = ""
    tokenizer: str = ""
    reference: str = ""
    critic: str = ""
    teacher: str = ""
    init: InitConfig = InitConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "full"] = "full"
    attention: Literal["auto", "plain"] = "auto"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How an update runs.

    Attributes:
      micro_tokens: most tokens of a micro-batch on each data shard; the gradient does not depend on it, memory does.
        At least the longest possible row; 0: as ``micro_rows`` says.
      micro_rows: where ``micro_tokens`` is 0, room for so many rows of the greatest length; 0: for all of a shard.
      vocab_chunk: tokens whose logits exist at one time on each data shard.
      max_skipped: stop the run after this many updates in a row with a non-finite loss or gradient.
    """

    micro_tokens: int = 0
    micro_rows: int = 8
    vocab_chunk: int = 512
    max_skipped: int = 5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 1 if field.name in ("vocab_chunk", "max_skipped") else 0
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name} = {getattr(self, field.name)}: must be at least {least}")


@dataclasses.dataclass(frozen=True)
class PackedTrainConfig(TrainConfig):
    """How an update runs on sampled rows, which lie end to end in packs, so that little of it is padding.

    Attributes:
      score_rows: ``micro_rows`` for scoring; 0: like an update.
      pack_tokens: tokens of a pack, of which a micro-batch has as many as fit. Longer packs have less padding, shorter
        ones cost less attention where it is not computed by blocks. 0: the shortest that any row fits into.
    """

    score_rows: int = 0
    pack_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How the devices are split.

    Attributes:
      train: sizes of the axes data, fsdp and tensor for scoring and updates; -1 is inferred.
    """

    train: Split = Split()


@dataclasses.dataclass(frozen=True)
class PhasesConfig(ParallelConfig):
    """How the devices are split in each phase, and what they hold meanwhile.

    Attributes:
      rollout: data and tensor for sampling.
      sampling_copy: the actor's layout for sampling: "drop" frees it when sampling ends and makes it again, "keep"
        holds it until the weights change. Weights that lie alike in both partitions are never copied.
      park: what waits in host memory during sampling: "optimizer" the optimizers' states, "all" the critic and the
        reference as well.
    """

    rollout: Split = Split()
    sampling_copy: Literal["drop", "keep"] = "drop"
    park: Parked = "none"


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What a run writes.

    Attributes:
      tensorboard: write event files.
      wandb_project: send metrics to this Weights & Biases project; empty: do not.
      export: write the trained model as a Hugging Face folder, ``WORKDIR/export``, at the end.
    """

    tensorboard: bool = True
    wandb_project: str = ""
    export: bool = True


@dataclasses.dataclass(frozen=True)
class SamplesReportConfig(ReportConfig):
    """What a run that samples writes.

    Attributes:
      samples_every: write samples every so many steps; 0: never.
      console_samples: completions shown on the console at each evaluation.
    """

    samples_every: int = 1
    console_samples: int = 3

    def __post_init__(self) -> None:
        for field in ("samples_every", "console_samples"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}: must not be negative")


@dataclasses.dataclass(frozen=True)
class Config:
    """What every run says.

    Attributes:
      algo: module in ``yatt_jax.algos``, or a full module path; it owns the type of ``hyper``.
      hyper: the algorithm's hyper-parameters.
      steps: how often rows are sampled, or taken from the data, and trained on.
      seed: of sampling, data order and fresh weights.
      compilation_cache: folder where compiled programs are kept between runs; empty: none.
      max_minutes: save and stop, with exit status 75, when the run has taken so long; 0: no limit.
    """

    algo: str = "ppo"
    hyper: Any = None
    steps: int = 100
    seed: int = 0
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    controller: ControllerConfig = ControllerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()
    compilation_cache: str = "~/.cache/yatt_jax"
    max_minutes: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}: must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}: must not be negative")
        if self.max_minutes < 0:
            raise ValueError(f"max_minutes = {self.max_minutes}: must not be negative")


@dataclasses.dataclass(frozen=True)
class OnlineRun(Config):
    """A run that samples what it trains on.

    Attributes:
      rewards: name -> function, weight, arguments.
      reward_on_error: what an exception in a reward does: "raise" stops the run with the sample, "count" masks it.
      reward_workers: threads that score samples.
      reward_column: of the prompts' records: the names of the rewards that a prompt asks for, or names with weights;
        empty: every prompt asks for all.
    """

    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: Mapping[str, RewardSpec] = dataclasses.field(default_factory=dict)
    reward_on_error: Literal["raise", "count"] = "raise"
    reward_workers: int = 1
    reward_column: str = ""
    actor_optimizer: OptimizerConfig = OptimizerConfig()
    critic_optimizer: OptimizerConfig = OptimizerConfig()
    train: PackedTrainConfig = PackedTrainConfig()
    parallel: PhasesConfig = PhasesConfig()
    evaluation: PromptsEvalConfig = PromptsEvalConfig()
    report: SamplesReportConfig = SamplesReportConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_workers < 1:
            raise ValueError(f"reward_workers = {self.reward_workers}: must be at least 1")
        if not self.rewards:
            raise ValueError("rewards: empty; name at least one, as {'name': {'fn': 'package.module:function'}}")


@dataclasses.dataclass(frozen=True)
class OfflineRun(Config):
    """A run that trains on rows as data gives them.

    Attributes:
      optimizer: of the model that is trained.
    """

    data: OfflineConfig = OfflineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: RowsEvalConfig = RowsEvalConfig()


def load_algo(name: str) -> types.ModuleType:
    """The module of an algorithm.

    Raises:
      ConfigError: no such module.
    """
    path = name if "." in name else f"yatt_jax.algos.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not path.startswith(error.name):
            raise
        import pkgutil

        import yatt_jax.algos

        known = sorted(module.name for module in pkgutil.iter_modules(yatt_jax.algos.__path__))
        raise ConfigError(f"algo = {name!r}: no such algorithm{nearest(name, known)}; there are {known}") from None


def run_type(algo: types.ModuleType) -> type[OnlineRun] | type[OfflineRun]:
    """What kind of run an algorithm makes: one that trains on rows of data says their type, ``ROWS``."""
    return OfflineRun if hasattr(algo, "ROWS") else OnlineRun


def default_config(algo: str = "ppo") -> Any:
    """Every key with its default, as an unlocked ConfigDict for config files to fill in.

    Typed ``Any``: a type checker knows nothing of a ConfigDict's keys, and ``parse`` checks them all.
    """
    module = load_algo(algo)
    tree = {f.name: _default(f) for f in dataclasses.fields(run_type(module))}
    tree["algo"] = algo
    tree["hyper"] = to_dict(module.Hyper())
    return ConfigDict(tree)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return to_dict(field.default)
    return to_dict(field.default_factory()) if field.default_factory is not dataclasses.MISSING else None


def parse(config: Mapping[str, Any] | ConfigDict) -> OnlineRun | OfflineRun:
    """Turns a ConfigDict into a run of the algorithm's kind.

    Raises:
      ConfigError: unknown keys, wrong types and values out of range, all of them at once.
    """
    faults: list[str] = []
    raw = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    hyper = raw.pop("hyper", None)
    algo = load_algo(str(raw.get("algo", "ppo")))
    parsed = from_dict(run_type(algo), raw, "config", faults)
    parsed_hyper = from_dict(algo.Hyper, hyper or {}, "config.hyper", faults)
    if faults:
        raise ConfigError("\n".join(faults))
    return dataclasses.replace(parsed, hyper=parsed_hyper)
