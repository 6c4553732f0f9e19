"""A job: the models, programs and files of one run, and the operations that both loops are written in."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import optax

from yatt_jax.controller.figures import check_skipped, rates
from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.keeper import Keeper, State
from yatt_jax.controller.load import load_roles
from yatt_jax.controller.record import Record
from yatt_jax.controller.resume import describe, find_start
from yatt_jax.controller.roles import Plan
from yatt_jax.controller.stops import StopRequested, Stops
from yatt_jax.errors import InputError
from yatt_jax.io.checkpoint_config import EarlyStop
from yatt_jax.io.checkpoint_read import Found
from yatt_jax.io.export import save_folder
from yatt_jax.io.fingerprint import fingerprint
from yatt_jax.io.model_card import run_card
from yatt_jax.parallel.repartition import free
from yatt_jax.report import facts as run_facts
from yatt_jax.report.console import open_console
from yatt_jax.report.metrics import to_floats
from yatt_jax.report.rundir import RunDir
from yatt_jax.report.timeline import Timeline
from yatt_jax.typed import to_dict
from yatt_jax.types import Metrics, Params, TrainState

# Exit status of a run that was told to stop, and saved.
STOPPED_EARLY = 75


class Source(Protocol):
    """What a job reads its prompts or rows from."""

    def state(self) -> dict[str, Any]:
        """Where this process stands, as plain JSON values."""
        ...

    def restore(self, states: Any) -> None:
        """Goes on from the states of all processes."""
        ...


class Programs(Protocol):
    """What every job compiles: optimizers beside whatever else its loop runs."""

    @property
    def transforms(self) -> Mapping[str, optax.GradientTransformation]:
        """Role -> optax transformation."""
        ...

    @property
    def schedules(self) -> Mapping[str, Callable[[int], Any]]:
        """Role -> learning rate by optimizer step."""
        ...


P = TypeVar("P", bound=Plan)


@dataclasses.dataclass(frozen=True)
class Step:
    """Figures of a step on the host.

    Attributes:
      facts: about its rows.
      updates: about its updates, learning rates included.
      counters: of the states, see ``check_skipped``.
      fetched: what else was asked for.
    """

    facts: dict[str, float]
    updates: dict[str, float]
    counters: dict[str, Any]
    fetched: Any


class Job(abc.ABC, Generic[P]):
    """Everything one process needs to run a loop. Each loop has a subclass with what it alone does.

    Args:
      plan: the checked run.
      workdir: the run directory, the same for all processes.
      hosts: this process among those of the job.
      resume: "latest" goes on from the newest checkpoint of the run directory, if there is one; or "never", or the step
        of a checkpoint.
      overwrite: discard an earlier run that is there.

    Attributes:
      states: what is trained, by role.
      frozen: weights of the other roles; an algorithm with iterations renews its reference.
      first_step: steps done before.
      resumed: whether the run goes on from a checkpoint.
      status: exit status of the command.

    Raises:
      InputError: data, rewards or weights that cannot be used, or a run directory that holds a run which cannot go on.
    """

    states: dict[str, TrainState]
    frozen: dict[str, Params]

    def __init__(
        self, plan: P, workdir: Path, hosts: Hosts | None = None, *, resume: str = "latest", overwrite: bool = False
    ):
        self._exit = contextlib.ExitStack()
        try:
            self._open(plan, workdir, hosts or Hosts(), resume, overwrite)
        except BaseException:
            self._exit.close()  # nobody else will: there is no job to leave
            raise

    # What each loop's job adds.

    @abc.abstractmethod
    def _open_inputs(self) -> Source:
        """Opens what the run reads, which checks it; returns its data."""

    @abc.abstractmethod
    def _make_programs(self) -> Programs:
        """Builds the programs; nothing compiles yet."""

    @abc.abstractmethod
    def _begin(self) -> None:
        """Makes what needs weights in place."""

    def _own_state(self) -> dict[str, Any]:
        """What this process alone holds between two steps, beside its place in the data; plain JSON values."""
        return {}

    def _restore_own(self, own: Sequence[Mapping[str, Any]]) -> None:
        """Takes back what ``_own_state`` gave, of every process of the run that was saved."""
        del own

    def _more_state(self) -> dict[str, Any]:
        """What all processes know of where the run stands, beside weights, data and configuration."""
        return {}

    def _restore_more(self, common: Mapping[str, Any]) -> None:
        """Takes back what ``_more_state`` gave."""
        del common

    # What they share.

    def _open(self, plan: P, workdir: Path, hosts: Hosts, resume: str, overwrite: bool) -> None:
        self.plan, self.hosts, self.algo = plan, hosts, plan.algo
        config = plan.config
        # Cheap checks come first: data and rewards before weights, weights before compiling.
        self._source = self._open_inputs()
        self.run = RunDir.open(workdir, hosts.process, hosts.count)
        self._exit.callback(self.run.close)
        self.run.take()
        self.keeper = Keeper(config, self.run.path, hosts, self._state)
        self._exit.callback(self.keeper.checkpoints.close)
        start = find_start(self.run, self.keeper.checkpoints, to_dict(config), hosts, resume, overwrite)
        sizes = {role: model.parameter_count for role, model in plan.models.items()}
        facts = run_facts.gather(sizes) | {"resumed": start.record()}
        self.run.write_config(to_dict(config), facts)
        self._versions = facts["versions"]
        self.stops = self._exit.enter_context(Stops(hosts, config.max_minutes))
        self.timeline = Timeline(self.run)
        hosts.waiting = lambda: self.timeline.phase("wait")
        self.console = self._exit.enter_context(open_console(hosts.process))
        self.record = Record(config, self.run, self.console, self.timeline)
        self._exit.callback(self.record.close)
        programs = self._make_programs()
        self._schedules = programs.schedules
        self.first_step, self.resumed, self.status = start.step, start.found is not None, 0
        self._step = start.step + (1 if self.resumed else 0)
        self.timeline.begin(self._step)
        self.timeline.introduce(**run_facts.here())
        with self.timeline.phase("load"):
            self.states, self.frozen = load_roles(plan, programs.transforms, self.console)
        reference = self.frozen.get("reference")
        self._reference = None if reference is None else fingerprint(reference)
        if start.found is not None:
            self._restore(start.found)
            self.console.message(describe(start))
            self._say_if_done(start.step)
        self.keeper.mark()
        self._updates: list[Metrics] = []
        self._begin()

    def _say_if_done(self, step: int) -> None:
        """A run that has ended trains no further step, whichever way it ended."""
        config, early = self.plan.config, self.keeper.early
        if early.reached(config.checkpoint):
            self.first_step = config.steps
            self.console.message(
                f"nothing is left to do: no better {config.checkpoint.best_metric} in {early.since} evaluations; raise "
                "config.checkpoint.early_stop_patience to go on"
            )
        elif step >= config.steps:
            self.console.message(f"nothing is left to do: {step} steps are done, and config.steps = {config.steps}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A timed phase of a step.

        Raises:
          StopRequested: before a phase of training, where a process was told to stop.
        """
        self.hosts.note(name, self._step)
        if name in _STOPPABLE:
            self.stops.check()
        with self.timeline.phase(name), self.console.phase(name):
            yield

    def evaluates(self, step: int) -> bool:
        """Whether the configuration asks for an evaluation after ``step`` steps."""
        every = self.plan.config.evaluation.every
        return bool(every) and (step % every == 0 or step in (0, self.plan.config.steps))

    def weights(self, role: str) -> Params:
        """The weights of a role as they are now."""
        return self.states[role].params if role in self.states else self.frozen[role]

    def _updated(self, role: str, state: TrainState, metrics: Metrics) -> None:
        """Takes the outcome of an update; its metrics stay on the devices until the step is reported."""
        self.states[role] = state
        self._updates.append({f"{role}/{name}": value for name, value in metrics.items()})

    def _fetch(self, facts: Metrics, more: Any = None) -> Step:
        """Brings the step's metrics, and whatever else, to the host in one transfer."""
        states = {f"{role}/{name}": getattr(state, name) for role, state in self.states.items() for name in _COUNTERS}
        fetched = jax.device_get((facts, self._updates, states, more))
        self._updates = []
        updates = to_floats(fetched[1]) if fetched[1] else {}
        return Step(to_floats(fetched[0]), updates | rates(self._schedules, fetched[2]), fetched[2], fetched[3])

    def _check_headway(self, step: Step) -> None:
        """Stops a run that makes no headway.

        Raises:
          RunFailure: too many updates in a row were skipped for a non-finite loss or gradient.
        """
        check_skipped(step.counters, self.states, self.plan.config.train.max_skipped)

    def write(self, step: int) -> None:
        """Writes the line of a step: everything gathered since the last one."""
        self.record.write(step)
        self.timeline.begin(min(step + 1, self.plan.config.steps))  # what ends a run is part of its last step
        self._step = step + 1

    # Nothing lost.

    def save(self, step: int) -> bool:
        """Saves if it is time, and says whether the run has stopped improving.

        Raises:
          CheckpointFailure: the last save failed, and ``config.checkpoint.on_failure`` is "stop".
        """
        with self.timeline.phase("save"):
            ends = self.keeper.save(step, self.record.last)
        self.record.add(self.keeper.checkpoints.metrics())
        if ends:
            best = self.plan.config.checkpoint.best_metric
            self.console.message(f"no better {best} in {self.keeper.early.since} evaluations: the run ends here")
        return ends

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Where the block is told to stop, saves the steps that are done; the same command goes on from there."""
        try:
            yield
        except StopRequested as told:
            step = max(self._step - 1, 0)
            self.keeper.stop(step)
            self._page()
            self.console.message(f"stopped after step {step} ({told}); the same command goes on from there")
            self.status = STOPPED_EARLY

    def _state(self) -> State:
        common = {"versions": self._versions, "reference": self._reference} | self._more_state()
        return State(self._arrays(), {"data": self._source.state()} | self._own_state(), common)

    def _arrays(self) -> dict[str, Any]:
        """What a checkpoint holds by role: states, and weights that are renewed as the run goes."""
        renewed = ("reference",) if hasattr(self.algo, "iteration_start") else ()
        return self.states | {role: self.frozen[role] for role in renewed}

    def _restore(self, found: Found) -> None:
        """Puts the run back where it was."""
        if found.common["reference"] != self._reference:
            raise InputError(
                f"{found.path}: the run was saved with another reference than the one that config.model names now: "
                "its files have changed; start a new run"
            )
        arrays = self._arrays()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
        free(jax.tree.leaves(arrays))
        with self.timeline.phase("restore"):
            restored = self.keeper.checkpoints.restore(found, like)
        self.states.update({role: restored[role] for role in self.states})
        self.frozen.update({role: weights for role, weights in restored.items() if role in self.frozen})
        self._source.restore([own["data"] for own in found.own])
        self._restore_own(found.own)
        self._restore_more(found.common)
        self.keeper.early = EarlyStop(**found.common["early_stop"])

    def finish(self) -> None:
        """Exports the trained model and writes the page."""
        self.keeper.checkpoints.wait()
        if self.keeper.checkpoints.unsaved and not self.plan.config.report.export:
            self.console.message(
                "the final weights are NOT saved: the last checkpoint failed, and config.report.export is off; mend "
                "the cause and give the same command again, which goes on from the newest checkpoint there is"
            )
        if self.plan.config.report.export:
            with self.phase("export"):
                folder, model = self.run.path / "export", self.plan.models[self.plan.first]
                save_folder(
                    folder,
                    model,
                    self.states[self.plan.first].params,
                    self.plan.hf_config,
                    self.plan.tokenizer,
                    dtype=self.plan.config.model.dtype,
                    generation_config=self.plan.generation_config,
                    run=run_card(self.run.path),
                    hosts=self.hosts,
                )
            talk = f"; talk to it with: python -m tools.chat {self.run.path}" if model.kind == "lm" else ""
            self.console.message(f"model written to {folder}{talk}")
        self._page()
        self.console.message(f"report: {self.run.report_file}")

    def _page(self) -> None:
        """Writes the page, once everything is in the files that it is made of."""
        # The page shows no waiting for itself: it could not say how long.
        self.hosts.waiting = contextlib.nullcontext
        self.hosts.barrier("the report")
        self.record.page()


_STOPPABLE = ("rollout", "data", "score", "train")
_COUNTERS = ("step", "skipped", "skipped_in_row")
