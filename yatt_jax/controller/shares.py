"""Roles on shares of this process's devices during the rollout phase, and their way to other shares."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from yatt_jax.controller.placement import Decision, Limits, Measurements, Phase, Placement, replan
from yatt_jax.models.build import Model
from yatt_jax.parallel.partition import Partition
from yatt_jax.parallel.shares import between_shares, make_shares, to_share
from yatt_jax.rollout.engine import Engine
from yatt_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Role:
    """A model that writes during the rollout phase.

    Attributes:
      model: that writes.
      engine: makes its engine for a share.
    """

    model: Model
    engine: Callable[[Partition], Engine]


class Shares:
    """Which role is where: engines by share, weights on shares, and what the controller decides.

    Programs of a split are compiled in a thread of its own before it is used, and kept. The object is one process's;
    other processes may share their devices among roles in other ways.

    Args:
      rollout: the job's sampling partition.
      roles: by name, the one that samples first; ``placement`` names the same.
      placement: to begin with.
      limits: of the controller.

    Attributes:
      placement: the one in use.
      decisions: what was decided after each phase.

    Raises:
      ValueError: a placement of other roles, or one that the devices do not allow.
    """

    def __init__(self, rollout: Partition, roles: Mapping[str, Role], placement: Placement, limits: Limits):
        if tuple(roles) != placement.roles:
            raise ValueError(f"placement of {list(placement.roles)}, and the roles are {list(roles)}")
        self.placement, self.decisions = placement, list[Decision]()
        self._rollout, self._roles = rollout, roles
        tensor = rollout.split.tensor
        self._limits = dataclasses.replace(limits, units=dict.fromkeys(roles, tensor) | dict(limits.units))
        self._engines: dict[tuple[str, Placement], Engine] = {}
        self._making = threading.Lock()
        self._seen: dict[str, Params] = {}  # shapes and dtypes of weights
        self._held: dict[str, Params] = {}
        self._phases: list[Phase] = []
        self._compiling: dict[Placement, Future[float]] = {}
        self._pool = ThreadPoolExecutor(1, "compile")
        self._used = {placement}
        self._move_seconds = 0.0
        self._shares(placement)

    def close(self) -> None:
        """Ends the thread once it is through with what it compiles."""
        self._pool.shutdown(cancel_futures=True)

    def engine(self, role: str) -> Engine:
        """The engine of a role on its share."""
        return self._engine(role, self.placement)

    def lay_out(self, role: str, params: Params) -> Params:
        """Weights that change, on the role's share; all processes call this together.

        Args:
          role: whose they are.
          params: on the job's mesh.
        """
        self._seen[role] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        return to_share(params, self._roles[role].model.axes, self._rollout, self._share(role, self.placement))

    def hold(self, role: str, params: Params) -> None:
        """Keeps weights that do not change on the role's share, wherever it moves; all processes call this together.

        Args:
          role: whose they are.
          params: on the job's mesh.
        """
        self._held[role] = self.lay_out(role, params)

    def held(self, role: str) -> Params:
        """The weights of ``hold`` on the role's share."""
        return self._held[role]

    def decide(self, phase: Phase) -> Decision:
        """Takes in what was measured of a phase, and moves where that is worth it.

        Between phases only: roles must not be at work.

        Raises:
          Exception: what a compilation in the background raised.
        """
        self._phases = [*self._phases, phase][-max(self._limits.window, self._limits.dwell) :]
        known = Measurements(self._phases, self._move_seconds, self._compile_seconds, self.compiled)
        decision = replan(self.placement, known, self._limits)
        for wanted in decision.compile:
            self.compile_ahead(wanted)
        if decision.placement != self.placement:
            self._move(decision.placement)
        self.decisions.append(decision)
        return decision

    @property
    def compiled(self) -> list[Placement]:
        """Placements whose programs are there: those in use so far, and those compiled ahead."""
        ahead = [placement for placement, future in self._compiling.items() if future.done()]
        return [*self._used, *ahead]

    def compile_ahead(self, placement: Placement) -> Future[float]:
        """Compiles a placement's programs in the background; the result is the seconds that it took.

        Every role must have been laid out before: the programs depend on what its weights are like.
        """
        if placement not in self._compiling:
            self._compiling[placement] = self._pool.submit(self._compile, placement)
        return self._compiling[placement]

    def _compile(self, placement: Placement) -> float:
        begin = time.perf_counter()
        for role, one in self._roles.items():
            share = self._share(role, placement)
            shapes = jax.tree.map(
                lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
                self._seen[role],
                one.model.shardings(share),
            )
            self._engine(role, placement).compile_ahead(shapes)
        return time.perf_counter() - begin

    @property
    def _compile_seconds(self) -> float:
        done = [future.result() for future in self._compiling.values() if future.done()]
        return max(done, default=0.0)

    def _move(self, placement: Placement) -> None:
        begin = time.perf_counter()
        self.placement = placement
        self._used.add(placement)
        for role, params in self._held.items():
            self._held[role] = between_shares(params, self._roles[role].model.axes, self._share(role, placement))
        jax.block_until_ready(self._held)
        self._move_seconds = time.perf_counter() - begin

    def _shares(self, placement: Placement) -> list[Partition]:
        return make_shares(self._rollout, [count for _, count in placement.shares])

    def _share(self, role: str, placement: Placement) -> Partition:
        return self._shares(placement)[placement.roles.index(role)]

    def _engine(self, role: str, placement: Placement) -> Engine:
        with self._making:
            if (role, placement) not in self._engines:
                self._engines[role, placement] = self._roles[role].engine(self._share(role, placement))
            return self._engines[role, placement]
