"""A job: the models, programs, data and files of one run, and the operations that the loops are written in."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from yatt_jax.config import to_dict
from yatt_jax.controller.figures import (
    check_skipped,
    engine_sums,
    mean_advantages,
    moved_sums,
    packing_figures,
    placed_figures,
    rates,
    reward_sums,
    spread,
)
from yatt_jax.controller.hosts import Hosts, totals
from yatt_jax.controller.inputs import open_inputs
from yatt_jax.controller.keeper import Keeper, State
from yatt_jax.controller.load import load_roles
from yatt_jax.controller.parking import Parking
from yatt_jax.controller.plan import Plan
from yatt_jax.controller.programs import make_programs
from yatt_jax.controller.record import Record
from yatt_jax.controller.resume import describe, find_start
from yatt_jax.controller.rows import Mover, Placed
from yatt_jax.controller.stops import StopRequested, Stops
from yatt_jax.errors import InputError
from yatt_jax.io.checkpoint_config import EarlyStop
from yatt_jax.io.checkpoint_read import Found
from yatt_jax.io.export import save_folder
from yatt_jax.io.fingerprint import fingerprint
from yatt_jax.io.model_card import run_card
from yatt_jax.parallel.local import sampling_group
from yatt_jax.parallel.pack import Packed
from yatt_jax.parallel.repartition import SecondLayout, free
from yatt_jax.report import facts as run_facts
from yatt_jax.report.console import open_console
from yatt_jax.report.metrics import grouped, to_floats
from yatt_jax.report.rundir import RunDir
from yatt_jax.report.samples import SampleLog
from yatt_jax.report.timeline import Timeline
from yatt_jax.rewards import Scores
from yatt_jax.rollout.engine import Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Metrics, Prompt, PyTree, Rollout, Sample

_LOG = logging.getLogger(__name__)

# Held-out samples draw from a seed of their own, so that they never share a random key with training samples.
EVALUATION_SEED = 1 << 32
# Exit status of a run that was told to stop, and saved.
STOPPED_EARLY = 75


class Job:
    """Everything one process needs to run the loops.

    Args:
      plan: the checked run.
      workdir: the run directory, the same for all processes.
      hosts: this process among those of the job.
      resume: "latest" goes on from the newest checkpoint of the run directory, if there is one; or "never", or the step
        of a checkpoint.
      overwrite: discard an earlier run that is there.

    Attributes:
      first_step: steps done before.
      resumed: whether the run goes on from a checkpoint.
      status: exit status of the command.

    Raises:
      InputError: data, rewards or weights that cannot be used, or a run directory that holds a run which cannot go on.
    """

    def __init__(
        self, plan: Plan, workdir: Path, hosts: Hosts | None = None, *, resume: str = "latest", overwrite: bool = False
    ):
        self._exit = contextlib.ExitStack()
        try:
            self._open(plan, workdir, hosts or Hosts(), resume, overwrite)
        except BaseException:
            self._exit.close()  # nobody else will: there is no job to leave
            raise

    def _open(self, plan: Plan, workdir: Path, hosts: Hosts, resume: str, overwrite: bool) -> None:
        self.plan, self.hosts = plan, hosts
        self.config, self.algo = plan.config, plan.algo
        config = plan.config
        # Cheap checks come first: data and rewards before weights, weights before compiling.
        inputs = open_inputs(plan, hosts)
        self.prompts, self.held_out, self.scorer = inputs.prompts, inputs.held_out, inputs.scorer
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
        self._exit.callback(self.scorer.close)
        self.samples = SampleLog(self.run)
        self.record = Record(config, self.run, self.console, self.timeline)
        self._exit.callback(self.record.close)
        self.programs = make_programs(plan)
        self.mover = Mover(plan, hosts)
        self._placed: Placed | None = None
        self._held = 0  # bytes of this process's rows on its host
        self._mean_advantages = jax.jit(mean_advantages, out_shardings=plan.train.rows)
        self.first_step, self.resumed, self.status = start.step, start.found is not None, 0
        self._step = start.step + (1 if self.resumed else 0)
        self.kl_coef = config.hyper.kl.coef
        self.timeline.begin(self._step)
        self.timeline.introduce(**run_facts.here())
        with self.timeline.phase("load"):
            self.states, self.frozen = load_roles(plan, self.programs.transforms, self.console)
        reference = self.frozen.get("reference")
        self._reference = None if reference is None else fingerprint(reference)
        if start.found is not None:
            self._restore(start.found)
            self.console.message(describe(start))
        self.keeper.mark()
        actor = plan.models["actor"]
        self.layout = SecondLayout(actor.axes, plan.rollout, keep=config.parallel.sampling_copy == "keep")
        self.parking = Parking(config.parallel.park, self.states, self.frozen)
        self.engine = self._make_engine()
        self._updates: list[Metrics] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _make_engine(self) -> Engine:
        """The engine of this process's rows; all processes have as many."""
        plan, sampling = self.plan, self.config.rollout
        most = math.ceil(sampling.prompts / self.hosts.count) * sampling.samples_per_prompt
        held_out = max(self.hosts.gather("held-out prompts", len(self.held_out)))
        self.held_out_anywhere = held_out > 0
        wanted = math.ceil(sampling.rows / self.hosts.count) or most
        group = sampling_group(plan.rollout).members
        return Engine(
            plan.models["actor"],
            plan.tokenizer,
            plan.rollout,
            rows=min(wanted, max(most, held_out)),
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            max_new_tokens=sampling.sampling.max_new_tokens,
            record_kept=plan.record_kept,
            agree=lambda value: self.hosts.gather("slots of the group", value, group),
        )

    @property
    def sampling(self) -> Sampling:
        """The run's sampling parameters, with the model's own stop tokens."""
        return dataclasses.replace(self.config.rollout.sampling, stop_token_ids=self.plan.stop_token_ids)

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

    # What the loops are written in.

    def sample(self, step: int) -> tuple[Rollout, list[Sample]]:
        """Draws the step's prompts and samples responses with the actor laid out for sampling."""
        draw = self.prompts.draw()
        count = self.config.rollout.samples_per_prompt
        ids = [number * count + i for number in draw.numbers for i in range(count)]
        prompts = [prompt for prompt in draw.prompts for _ in range(count)]
        groups = [number % self.config.rollout.prompts for number in draw.numbers for _ in range(count)]
        return self.generate(prompts, ids, groups, self.sampling, seed=self.config.seed, version=step)

    def generate(
        self,
        prompts: Sequence[Prompt],
        ids: Sequence[int],
        groups: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        version: int,
    ) -> tuple[Rollout, list[Sample]]:
        """Samples a response to each prompt with the current actor; see ``Engine.generate``."""
        with self.timeline.phase("repartition"):
            self.parking.leave()
            laid_out = self.layout.of(self.states["actor"].params, wait=True)
            laid_out = self.engine.group.take(laid_out, self.plan.models["actor"].axes)
        with self.timeline.phase("sample"):
            found = self.engine.generate(
                laid_out, prompts, sampling, seed=seed, sample_ids=ids, groups=groups, version=version
            )
        self.layout.done()
        self.parking.come_back()  # while rewards are computed
        return found

    def reward(self, samples: Sequence[Sample]) -> Scores:
        """Scores samples on the host; NaN marks an invalid one, such as a row whose logits were not finite."""
        with self.timeline.phase("reward"):
            scores = self.scorer(samples)
        broken = np.array([sample.finish == "invalid" for sample in samples], bool)
        return dataclasses.replace(scores, total=np.where(broken, np.float32(np.nan), scores.total))

    def score(self, role: str, rollout: Rollout) -> PyTree:
        """A model's scores of placed rows."""
        assert self._placed is not None
        params = self.states[role].params if role in self.states else self.frozen[role]
        return self.programs.score[role](params, Packed(rollout, self._placed.layout), self._temperature)

    @property
    def _temperature(self) -> np.float32:
        return np.float32(self.config.rollout.sampling.temperature)

    def place(self, rollout: Rollout, rewards: Scores) -> tuple[Rollout, jax.Array]:
        """Rows and rewards on the devices, spread over the data shards."""
        self._held = sum(leaf.nbytes for leaf in jax.tree.leaves(rollout))
        with self.timeline.phase("exchange"):
            rows, row_rewards, self._placed = self.mover.place(rollout, rewards.total)
        self.record.add(grouped("rollout", placed_figures(self._placed.assigned, self._placed.filled)))
        return rows, row_rewards

    def prepare(self, rollout: Rollout, rewards: jax.Array, scores: dict[str, PyTree]) -> tuple[PyTree, Metrics]:
        """The algorithm's batch, and facts about the rollout."""
        return self.programs.prepare(rollout, rewards, scores, np.float32(self.kl_coef))

    def minibatches(self, batch: PyTree, step: int) -> Iterator[Packed]:
        """The minibatches of a step: every row once an epoch, in a new order each time."""
        assert self._placed is not None
        yield from self.mover.minibatches(batch, self._placed, step)

    def update(self, role: str, minibatch: Packed) -> None:
        """One optimizer step of a role; its metrics stay on the devices until the step is reported."""
        state, metrics = self.programs.update[role](self.states[role], minibatch, self._temperature)
        self.states[role] = state
        self._updates.append({f"{role}/{name}": value for name, value in metrics.items()})

    def far_enough(self) -> bool:
        """Whether the policy has moved beyond ``target_kl``, so that the rest of the step's minibatches is dropped."""
        target = self.config.hyper.target_kl
        if not target or "actor/kl_update" not in self._updates[-1]:
            return False
        return to_floats({"kl": self._updates[-1]["actor/kl_update"]})["kl"] > target

    def report(self, step: int, samples: Sequence[Sample], rewards: Scores, batch: PyTree, facts: Metrics) -> None:
        """Brings the step's metrics to the host and checks them; ``write`` puts them out.

        Raises:
          RunFailure: too many updates in a row were skipped for a non-finite loss or gradient.
        """
        states = {f"{role}/{name}": getattr(state, name) for role, state in self.states.items() for name in _COUNTERS}
        advantages = self._mean_advantages(batch)
        *metrics, counters = jax.device_get(([facts], self._updates, states))
        found = to_floats(metrics[0])
        updates = to_floats(metrics[1]) if metrics[1] else {}
        updates |= packing_figures(self.mover.filled, self.plan.train.row_shards)
        self._updates = []
        found["kl_coef"] = self.kl_coef
        self._adapt(found, self.plan.rows)
        own = reward_sums(rewards, samples) | engine_sums(self.engine.stats) | moved_sums(self.layout.moved)
        own["bytes_per_process"] = self._held, 1
        found |= spread(totals(self.hosts.gather("metrics of a step", own)))
        self.record.add(grouped("rollout", found))
        self.record.add(grouped("train", updates | rates(self.programs.schedules, counters)))
        every = self.config.report.samples_every
        if every and step % every == 0:
            self.samples.write(step, "train", samples, rewards.total, rewards.rewards, self._values_of_own(advantages))
        check_skipped(counters, self.states, self.config.train.max_skipped)

    def write(self, step: int) -> None:
        """Writes the line of a step: everything gathered since the last one."""
        self.record.write(step)
        self.timeline.begin(step + 1)
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
            best = self.config.checkpoint.best_metric
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
            self.hosts.barrier("the report")
            self.record.page()
            self.console.message(f"stopped after step {step} ({told}); the same command goes on from there")
            self.status = STOPPED_EARLY

    def _state(self) -> State:
        common = {
            "versions": self._versions,
            "kl_coef": self.kl_coef,
            "reference": self._reference,
        }
        return State(self.states, {"data": self.prompts.state()}, common)

    def _restore(self, found: Found) -> None:
        """Puts the run back where it was."""
        if found.common["reference"] != self._reference:
            raise InputError(
                f"{found.path}: the run was saved with another reference than the one that config.model names now: "
                "its files have changed; start a new run"
            )
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.states)
        free(jax.tree.leaves(self.states))
        with self.timeline.phase("restore"):
            self.states.update(self.keeper.checkpoints.restore(found, like))
        self.prompts.restore([own["data"] for own in found.own])
        self.kl_coef = found.common["kl_coef"]
        self.keeper.early = EarlyStop(**found.common["early_stop"])

    def finish(self) -> None:
        """Exports the actor and writes the page."""
        self.keeper.checkpoints.wait()
        if self.config.report.export:
            with self.phase("export"):
                actor = self.plan.models["actor"]
                folder = self.run.path / "export"
                save_folder(
                    folder,
                    actor,
                    self.states["actor"].params,
                    self.plan.hf_config,
                    self.plan.tokenizer,
                    dtype=self.config.model.dtype,
                    generation_config=self.plan.generation_config,
                    run=run_card(self.run.path),
                    hosts=self.hosts,
                )
            self.console.message(f"model written to {folder}; talk to it with: python -m tools.chat {self.run.path}")
        self.hosts.barrier("the report")  # everything is in the files that it is made of
        self.record.page()
        self.console.message(f"report: {self.run.report_file}")

    def _values_of_own(self, values: jax.Array) -> np.ndarray:
        """This process's part of an array with a value for each placed row."""
        assert self._placed is not None
        return self.mover.own(values, self._placed)

    def _adapt(self, found: Mapping[str, float], rows: int) -> None:
        """Steers the price of the divergence by what the rollout showed."""
        if "kl_response" in found:
            self.kl_coef = float(self.config.hyper.kl.adapted(self.kl_coef, found["kl_response"], rows))


_STOPPABLE = ("rollout", "score", "train")
_COUNTERS = ("step", "skipped", "skipped_in_row")
