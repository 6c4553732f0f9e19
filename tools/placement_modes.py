"""The modes that ``tools.simulate_placement`` compares, each played on the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from tools.placement_workloads import Workload
from tools.placement_world import JUDGE, SAMPLER, Batch, Machine, split_phase, turns_phase
from yatt_jax.controller.placement import Limits, Measurements, Phase, Placement, placements, replan

ROLES = SAMPLER, JUDGE


@dataclasses.dataclass(frozen=True)
class Move:
    """A move of one host.

    Attributes:
      step: that began with it.
      placement: the new one.
      reason: of the controller.
      forecast: seconds of the phase, as it said; NaN where it stayed.
    """

    step: int
    placement: Placement
    reason: str
    forecast: float


@dataclasses.dataclass(frozen=True)
class HostRun:
    """One host in every mode; arrays by step are seconds of its rollout phase.

    Attributes:
      splits: [steps, splits], on every fixed split.
      turns: [steps], taking turns.
      adaptive: [steps], with the controller, moves included.
      sampling: [steps], devices that sampled then.
      moves: of the controller.
      errors: relative errors of its forecasts of the phase after a move.
      apart: [steps, splits], on splits that leave devices to training.
      tokens: [steps], that are trained on.
    """

    splits: np.ndarray
    turns: np.ndarray
    adaptive: np.ndarray
    sampling: np.ndarray
    moves: list[Move]
    errors: list[float]
    apart: np.ndarray
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """A job in every mode; arrays are seconds by step, of rollout phases where nothing else is said.

    Attributes:
      oracle: the best split of every host at every step, for which moving costs nothing.
      fixed: by split, the same on all hosts and at all steps.
      adaptive: with a controller on every host.
      colocated: taking turns.
      training: seconds of training on all devices.
      disaggregated: mean seconds of a whole step by staleness, of the best split that leaves devices to training.
      hosts: each host's run.
    """

    oracle: np.ndarray
    fixed: dict[Placement, np.ndarray]
    adaptive: np.ndarray
    colocated: np.ndarray
    training: np.ndarray
    disaggregated: dict[int, tuple[str, float]]
    hosts: list[HostRun]

    @property
    def best_fixed(self) -> Placement:
        """The fixed split with the least time in all, found by trying every one."""
        return min(self.fixed, key=lambda placement: self.fixed[placement].sum())

    @property
    def moves_a_step(self) -> float:
        """Moves of a host in each step, mean over hosts."""
        return float(np.mean([len(host.moves) for host in self.hosts])) / len(self.adaptive)


def play(
    machine: Machine, workload: Workload, hosts: int, seed: int, limits: Limits, *, workers: int = 1, apart: bool = True
) -> Run:
    """Plays a workload in every mode.

    Args:
      machine: the world.
      workload: what to play.
      hosts: number of hosts.
      seed: of the rows.
      limits: of the controllers.
      workers: processes that hosts are spread over.
      apart: play the disaggregated mode, too.
    """
    tasks = [(machine, workload, host, seed, limits, apart) for host in range(hosts)]
    if workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            runs = list(pool.map(_host, *zip(*tasks, strict=True), chunksize=max(1, hosts // (4 * workers))))
    else:
        runs = [_host(*task) for task in tasks]
    slowest = np.max([run.splits for run in runs], axis=0)
    training = np.array(
        [machine.training(np.sum([run.tokens[step] for run in runs]), machine.devices * hosts)
         for step in range(workload.steps)]
    )  # fmt: skip
    return Run(
        oracle=np.max([run.splits.min(axis=1) for run in runs], axis=0),
        fixed={placement: slowest[:, i] for i, placement in enumerate(_splits(machine))},
        adaptive=np.max([run.adaptive for run in runs], axis=0),
        colocated=np.max([run.turns for run in runs], axis=0),
        training=training,
        disaggregated=_disaggregated(machine, np.max([run.apart for run in runs], axis=0), training) if apart else {},
        hosts=runs,
    )


def _splits(machine: Machine) -> list[Placement]:
    return placements(ROLES, machine.devices, {})


def _apart(machine: Machine) -> list[Placement]:
    """Splits that leave a quarter or a half of the devices to training."""
    left = [machine.devices - machine.devices // 4, machine.devices - machine.devices // 2]
    return [placement for devices in left for placement in placements(ROLES, devices, {})]


def _host(machine: Machine, workload: Workload, host: int, seed: int, limits: Limits, apart: bool) -> HostRun:
    splits, steps = _splits(machine), workload.steps
    seconds, turns, adaptive, sampling = np.zeros((steps, len(splits))), *np.zeros((3, steps))
    elsewhere = _apart(machine) if apart else []
    beside, tokens = np.zeros((steps, len(elsewhere))), np.zeros(steps)
    controller = _Controller(machine, limits, splits[(len(splits) - 1) // 2])
    for step in range(steps):
        batch: Batch = workload.batch(machine, step, host, seed)
        phases = {placement: split_phase(machine, batch, placement) for placement in splits}
        seconds[step] = [phases[placement].seconds for placement in splits]
        turns[step] = turns_phase(machine, batch)
        beside[step] = [split_phase(machine, batch, placement).seconds for placement in elsewhere]
        tokens[step] = batch.tokens
        sampling[step] = controller.placement[SAMPLER]
        training = machine.training(batch.tokens, machine.devices)
        adaptive[step] = controller.step(step, phases[controller.placement], training)
    return HostRun(seconds, turns, adaptive, sampling, controller.moves, controller.errors, beside, tokens)


class _Controller:
    """A host's controller, and the programs that it has compiled.

    The host's own clock says when a program is there: waiting for slower hosts is not counted.
    """

    def __init__(self, machine: Machine, limits: Limits, placement: Placement):
        self.placement, self.moves, self.errors = placement, list[Move](), list[float]()
        self._machine, self._limits = machine, limits
        self._phases: list[Phase] = []
        self._ready = {placement: 0.0}  # when the programs of a split are there
        self._clock, self._cost, self._forecast = 0.0, 0.0, np.nan

    def step(self, step: int, phase: Phase, training: float) -> float:
        """Seconds of a phase, with what moving to its placement cost; decides about the next one."""
        machine = self._machine
        spent = phase.seconds + self._cost
        self._clock += spent + training
        if self._cost:
            self.errors.append(self._forecast / phase.seconds - 1)
        self._phases.append(phase)
        there = [placement for placement, when in self._ready.items() if when <= self._clock]
        known = Measurements(self._phases, machine.move, machine.compile, there)
        decision = replan(self.placement, known, self._limits)
        self._cost = 0.0
        for placement in decision.compile:
            self._ready.setdefault(placement, self._clock + machine.compile)
        if decision.placement != self.placement:
            self._cost = machine.move
            if decision.placement not in there:  # it was not compiled in the background
                self._cost += machine.compile
                self._ready[decision.placement] = self._clock
            self.placement, self._forecast = decision.placement, decision.seconds
            self.moves.append(Move(step + 1, decision.placement, decision.reason, decision.seconds))
        return spent


def _disaggregated(machine: Machine, phases: np.ndarray, training: np.ndarray) -> dict[int, tuple[str, float]]:
    """The best split for each staleness: what is sampled with weights that are so many updates old at most."""
    found = {}
    for staleness in (1, 2, 4):
        times = []
        for i, placement in enumerate(_apart(machine)):
            devices = machine.devices - placement.devices
            seconds = training * machine.devices / devices
            whole = overlapped(phases[:, i].tolist(), seconds.tolist(), staleness) / len(seconds)
            times.append((whole, f"{placement} + train {devices}"))
        best = min(times)
        found[staleness] = best[1], best[0]
    return found


def overlapped(sampling: Sequence[float], training: Sequence[float], staleness: int) -> float:
    """Seconds until all steps are trained, where sampling and training have devices of their own.

    Args:
      sampling: seconds of each step's rollout phase.
      training: seconds of each step's update.
      staleness: most updates that the weights which sample a step may lack; 0: none, so that nothing overlaps.
    """
    sampled, trained = 0.0, [0.0]
    for step, (rollout, update) in enumerate(zip(sampling, training, strict=True)):
        sampled = max(sampled, trained[max(0, step - staleness)]) + rollout
        trained.append(max(sampled, trained[-1]) + update)
    return trained[-1]
