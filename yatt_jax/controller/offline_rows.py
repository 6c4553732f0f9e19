"""Rows of data: opening them checks them; and their way from each process to the data shards."""

from __future__ import annotations

import math

import jax
import numpy as np
from jaxtyping import Int

from yatt_jax.config import ConfigError
from yatt_jax.controller.hosts import Hosts, Sums
from yatt_jax.controller.offline_plan import OfflinePlan
from yatt_jax.controller.offline_programs import make_offline_programs, measured
from yatt_jax.controller.roles import check_metric
from yatt_jax.data.collate import Draw, padded_length
from yatt_jax.data.offline import OfflineSource
from yatt_jax.parallel.process_rows import device_share, from_process_rows
from yatt_jax.types import LabelRows, PyTree


def open_rows(plan: OfflinePlan, hosts: Hosts) -> OfflineSource:
    """Opens the data, and checks what only its rows can tell.

    Raises:
      ConfigError: settings that do not fit the rows.
      InputError: files that are missing or malformed.
    """
    config = plan.config
    source = OfflineSource(
        config.data,
        plan.tokenizer,
        plan.kind,
        needs_gap=plan.needs_gap,
        seed=config.seed,
        process_index=hosts.process,
        process_count=hosts.count,
    )
    if plan.kind is LabelRows and source.width != plan.labels:
        raise ConfigError(
            f"config.hyper.attributes = {plan.labels}: the labels in config.data.train have {source.width} numbers"
        )
    if config.checkpoint.best_metric:
        known = measured(plan, make_offline_programs(plan), source.width)
        held_out = bool(config.data.eval or config.data.holdout)
        faults = check_metric(config, [f"eval/{name}" for name in known])
        if not held_out:
            faults.append("config.checkpoint.best_metric needs held-out rows: set config.data.eval or data.holdout")
        if faults:
            raise ConfigError("\n".join(faults))
    return source


class Feeder:
    """Brings the rows of all processes to the devices, in arrays of few shapes.

    Args:
      plan: the run.
      hosts: this process among those of the job.
      numbered: whether the numbers of records are wanted.

    Attributes:
      numbers: of the rows placed last, over all processes, the number of each one's record; -1 for no record. Known
        where it is wanted and rows hold one record each.
    """

    def __init__(self, plan: OfflinePlan, hosts: Hosts, *, numbered: bool = False):
        self._numbered = numbered
        self._plan, self._hosts = plan, hosts
        self._spread = jax.jit(lambda tree: tree, out_shardings=plan.train.rows)
        self._everywhere = jax.jit(lambda tree: tree, out_shardings=plan.train.replicated)
        self.numbers: Int[np.ndarray, "B"] = np.zeros(0, np.int64)

    def place(self, draw: Draw) -> tuple[PyTree, Sums]:
        """Rows spread over the data shards; no process sees those of another.

        Args:
          draw: this process's rows.

        Returns:
          The rows, filled up by rows of weight 0; and figures of this process's part, to be added up.
        """
        train = self._plan.train
        numbers = [row[0] if row else -1 for row in draw.numbers] if self._numbered and not draw.pack else []
        agreed = self._hosts.gather("rows of a step", [*draw.shape, numbers])
        rows, length = max(rows for rows, _, _ in agreed), max(length for _, length, _ in agreed)
        if draw.pack:
            length, rows = padded_length(draw.pack), _few(rows)
        rows = self._fitting(rows, length)
        self.numbers = np.array([theirs + [-1] * (rows - len(theirs)) for _, _, theirs in agreed], np.int64).reshape(-1)
        padding, places = draw.padding(rows, length)
        sums: Sums = {
            "padding": (padding, places),
            "tokens": (places - padding, None),
            "rows": (sum(map(len, draw.rows)), None),
        }
        return self._spread(from_process_rows(draw.collate(rows, length), rows, train)), sums

    def spread(self, values: np.ndarray) -> jax.Array:
        """Values of the rows placed last, which every process has, where the rows are."""
        return jax.make_array_from_callback(values.shape, self._plan.train.rows, lambda index: values[index])

    def everywhere(self, values: jax.Array) -> np.ndarray:
        """Values of the rows placed last, in every process."""
        return np.asarray(self._everywhere(values))

    def _fitting(self, rows: int, length: int) -> int:
        """Rows of each process, so that devices and micro-batches divide them."""
        plan, mesh = self._plan, self._plan.train.mesh
        tensor = mesh.size // plan.train.row_shards
        share = device_share(mesh)
        each = math.ceil(rows / share)
        micro = plan.micro((mesh.size * each, plan.sequences, length))
        step = micro // math.gcd(micro, tensor)
        return share * step * math.ceil(each / step)


def _few(rows: int) -> int:
    """A number of rows that is no smaller, one of eight between a power of two and the next: packed rows vary."""
    step = max(1, 2 ** (max(rows, 1).bit_length() - 1) // 8)
    return math.ceil(max(rows, 1) / step) * step
