"""Rows of data: opening them checks them; and their way from each process to the data shards."""

from __future__ import annotations

import math

import jax

from yatt_jax.config import ConfigError
from yatt_jax.controller.hosts import Hosts, Sums
from yatt_jax.controller.offline_plan import OfflinePlan
from yatt_jax.controller.offline_programs import make_offline_programs, measured
from yatt_jax.controller.roles import check_metric
from yatt_jax.data.collate import Draw
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
    """

    def __init__(self, plan: OfflinePlan, hosts: Hosts):
        self._plan, self._hosts = plan, hosts
        self._spread = jax.jit(lambda tree: tree, out_shardings=plan.train.rows)

    def place(self, draw: Draw) -> tuple[PyTree, Sums]:
        """Rows spread over the data shards; no process sees those of another.

        Args:
          draw: this process's rows.

        Returns:
          The rows, filled up by rows of weight 0; and figures of this process's part, to be added up.
        """
        plan, train = self._plan, self._plan.train
        shapes = self._hosts.gather("rows of a step", draw.shape)
        rows, length = max(rows for rows, _ in shapes), max(length for _, length in shapes)
        if plan.config.data.pack:
            length, rows = plan.row_tokens, _few(rows)
        rows = self._fitting(rows, length)
        padding, places = draw.padding(rows, length)
        sums: Sums = {
            "padding": (padding, places),
            "tokens": (places - padding, None),
            "rows": (sum(map(len, draw.rows)), None),
        }
        return self._spread(from_process_rows(draw.collate(rows, length), rows, train)), sums

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
