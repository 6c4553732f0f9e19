"""What a run on given rows will do, worked out and checked before a weight is read or a program compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from yatt_jax.config import ConfigError, OfflineRun, load_algo
from yatt_jax.controller.roles import Plan, check_axes, check_length, load_tokenizer, plan_roles
from yatt_jax.data.collate import padded_length
from yatt_jax.data.formats import Kind
from yatt_jax.parallel.local import job_devices
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.types import PairRows, UnpairedRows


@dataclasses.dataclass(frozen=True)
class OfflinePlan(Plan):
    """A checked run on given rows.

    Attributes:
      kind: type of the rows.
      labels: outputs of the reward model, where one is trained.
    """

    config: OfflineRun
    kind: Kind
    labels: int

    @property
    def needs_gap(self) -> bool:
        """Whether a pair must say by how much its chosen response is better."""
        needs = getattr(self.algo, "needs_gap", None)
        return bool(needs and needs(self.config.hyper))

    @property
    def row_tokens(self) -> int:
        """Length of the longest possible row's arrays."""
        return padded_length(self.config.data.pack or self.config.data.max_tokens)

    @property
    def sequences(self) -> int:
        """Sequences of a row."""
        return 2 if self.kind in (PairRows, UnpairedRows) else 1

    def micro(self, shape: Sequence[int]) -> int:
        """The number of micro-batches.

        Args:
          shape: of the tokens of a batch, ``[B, T]`` or ``[B, 2, T]``; B is a multiple of the data shards.
        """
        train, here = self.config.train, max(1, shape[0] // self.train.row_shards)
        each = train.micro_tokens // math.prod(shape[1:]) if train.micro_tokens else train.micro_rows or here
        return math.ceil(here / max(1, min(each, here)))

    @property
    def micro_batch(self) -> tuple[int, int]:
        """The largest micro-batch of a data shard: sequences, and tokens of each."""
        rows = math.ceil(self.config.data.batch / self.train.row_shards)
        micro = self.micro((rows * self.train.row_shards, self.sequences, self.row_tokens))
        return math.ceil(rows / micro) * self.sequences, self.row_tokens

    def step_lines(self) -> list[str]:
        """What ``describe`` says of a step."""
        data, (sequences, length) = self.config.data, self.micro_batch
        what = f"packed into rows of {data.pack} tokens" if data.pack else f"of up to {data.max_tokens} tokens each"
        return [
            f"{data.batch} records as {self.kind.__name__}, {self.sequences} x {what}",
            f"1 update in micro-batches of up to {sequences} x {length} tokens on each of {self.train.row_shards} data "
            "shards",
        ]


def make_offline_plan(config: OfflineRun) -> OfflinePlan:
    """Works a run out and checks it: files exist, axes divide, sizes fit together. Reads no weights.

    Raises:
      ConfigError: with every fault that was found.
      InputError: a file that cannot be read.
    """
    algo, hyper = load_algo(config.algo), config.hyper
    tokenizer = load_tokenizer(config)
    names = (*algo.TRAINS, *sorted({*algo.scored_by(hyper)} - {*algo.TRAINS}))
    labels = algo.labels(hyper) if hasattr(algo, "labels") else 1
    roles = plan_roles(config, tokenizer, names, algo.TRAINS, labels)
    try:
        sizes = {model.config.kv_heads for model in roles.models.values()}
        train, _ = make_partitions(config.parallel.train, Split(), job_devices(), kv_heads=sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    plan = OfflinePlan(
        config=config,
        algo=algo,
        train=train,
        tokenizer=tokenizer,
        **vars(roles),
        updates={
            role: max(1, sum(role in algo.trains(hyper, step) for step in range(config.steps))) for role in algo.TRAINS
        },
        kind=algo.ROWS,
        labels=labels,
    )
    faults = check_axes(roles.models, {role: (train,) for role in roles.models})
    faults += [*check_length(config.data.max_tokens, "config.data.max_tokens", roles.hf_config), *algo.check(hyper)]
    longest = plan.sequences * plan.row_tokens
    if 0 < config.train.micro_tokens < longest:
        faults.append(
            f"config.train.micro_tokens = {config.train.micro_tokens}: the longest possible row needs at least "
            f"{longest} ({plan.sequences} x data.{'pack' if config.data.pack else 'max_tokens'}, rounded up)"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return plan
