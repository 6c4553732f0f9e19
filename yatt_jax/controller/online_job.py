"""The job of a run that samples: prompts, engine and rewards, and the operations that its loop is written in."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from yatt_jax.config import OnlineRun
from yatt_jax.controller.collect import Collector
from yatt_jax.controller.figures import (
    engine_sums,
    mean_advantages,
    moved_sums,
    packing_figures,
    placed_figures,
    reward_sums,
    spread,
)
from yatt_jax.controller.hosts import totals
from yatt_jax.controller.inputs import open_inputs
from yatt_jax.controller.job import Job, Source
from yatt_jax.controller.load import make_copy
from yatt_jax.controller.online_plan import OnlinePlan, samplers
from yatt_jax.controller.parking import Parking
from yatt_jax.controller.programs import Programs, make_programs
from yatt_jax.controller.reference_rewards import fit_scales
from yatt_jax.controller.rows import Mover
from yatt_jax.controller.spread import Placed
from yatt_jax.errors import InputError
from yatt_jax.parallel.local import sampling_group
from yatt_jax.parallel.pack import Packed
from yatt_jax.parallel.repartition import SecondLayout
from yatt_jax.report.metrics import grouped, to_floats
from yatt_jax.report.samples import SampleLog
from yatt_jax.rewards import Scale, Scores
from yatt_jax.rollout.answers import with_answers
from yatt_jax.rollout.assemble import Result, assemble
from yatt_jax.rollout.engine import Ask, Engine, Stats
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Metrics, Params, Prompt, PyTree, Rollout, Sample

# Held-out samples draw from a seed of their own, so that they never share a random key with training samples.
EVALUATION_SEED = 1 << 32


class OnlineJob(Job[OnlinePlan]):
    """Everything one process needs to run the online loop; see ``Job``."""

    def _open_inputs(self) -> Source:
        inputs = open_inputs(self.plan, self.hosts, self.weights)
        self.prompts, self.held_out, self.scorer = inputs.prompts, inputs.held_out, inputs.scorer
        self.vote = inputs.vote
        self.opponent: np.ndarray | None = None  # rewards of the reference's held-out samples
        self._exit.callback(self.scorer.close)
        self.kl_coef = self.config.hyper.kl.coef
        self.collector = Collector(self.config, self.prompts, self.scorer, self.hosts, self)
        self._stats: list[Stats] = []
        return self.prompts

    def _make_programs(self) -> Programs:
        self.programs = make_programs(self.plan)
        return self.programs

    def _begin(self) -> None:
        plan, config = self.plan, self.config
        self.samples = SampleLog(self.run)
        self.mover = Mover(plan, self.hosts)
        self._placed: Placed | None = None
        self._held = 0  # bytes of this process's rows on its host
        self._mean_advantages = jax.jit(mean_advantages, out_shardings=plan.train.rows)
        keep = config.parallel.sampling_copy == "keep"
        self._layouts = {
            role: SecondLayout(plan.models[role].axes, plan.rollout, keep=keep) for role in samplers(plan.algo, config)
        }
        self._copy: Callable[[Params], Params] | None = None
        self.parking = Parking(config.parallel.park, self.states, self.frozen)
        engine = self._make_engine("actor")
        # A reference of other sizes needs programs of its own.
        same = all(plan.models[role].config == plan.models["actor"].config for role in self._layouts)
        self._engines = {role: engine if same or role == "actor" else self._make_engine(role) for role in self._layouts}
        if not self.resumed:
            self.scorer.scales = fit_scales(self)
        for name, scale in self.scorer.scales.items():
            self.record.add({f"rollout/reference_mean/{name}": scale.mean})
            self.record.add({f"rollout/reference_std/{name}": scale.deviation})

    def _own_state(self) -> dict[str, Any]:
        return {"collector": self.collector.state()}

    def _restore_own(self, own: Sequence[Mapping[str, Any]]) -> None:
        self.collector.restore([state["collector"] for state in own if "collector" in state])

    def _more_state(self) -> dict[str, Any]:
        scales = {name: [scale.mean, scale.deviation] for name, scale in self.scorer.scales.items()}
        return {"kl_coef": self.kl_coef, "reward_scales": scales}

    def _restore_more(self, common: Mapping[str, Any]) -> None:
        self.kl_coef = common["kl_coef"]
        saved = common.get("reward_scales", {})
        wanted = [name for name, spec in self.config.rewards.items() if spec.reference]
        missing = [name for name in wanted if name not in saved]
        if missing:
            raise InputError(
                f"config.rewards.{missing[0]}.reference was 0 when the run was saved, and the starting policy is gone; "
                "set it to 0, or start a new run"
            )
        self.scorer.scales = {name: Scale(*saved[name]) for name in wanted}

    @property
    def config(self) -> OnlineRun:
        """The run's configuration."""
        return self.plan.config

    def _make_engine(self, role: str) -> Engine:
        """The engine of a role and of this process's rows; all processes have as many."""
        plan, sampling = self.plan, self.config.rollout
        drawn = sampling.prompts + sampling.extra_prompts
        most = math.ceil(drawn / self.hosts.count) * sampling.samples_per_prompt
        held_out = max(self.hosts.gather("held-out prompts", len(self.held_out))) * self.config.evaluation.samples
        self.held_out_anywhere = held_out > 0
        wanted = math.ceil(plan.sampled_rows / self.hosts.count)
        group = sampling_group(plan.rollout).members
        return Engine(
            plan.models[role],
            plan.tokenizer,
            plan.rollout,
            rows=min(wanted, max(most, held_out)),
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            max_new_tokens=sampling.sampling.max_new_tokens,
            record_kept=plan.record_kept,
            cache_dtype=None if sampling.cache_dtype == "auto" else sampling.cache_dtype,
            resumes=sampling.tail == "carry",
            agree=lambda value: self.hosts.gather("slots of the group", value, group),
        )

    @property
    def sampling(self) -> Sampling:
        """The run's sampling parameters, with the model's own stop tokens."""
        return dataclasses.replace(self.config.rollout.sampling, stop_token_ids=self.plan.stop_token_ids)

    @property
    def layout(self) -> SecondLayout:
        """The sampler's layout for sampling."""
        return self._layouts[self.plan.sampler]

    # What the loops are written in.

    def collect(self, step: int) -> tuple[Rollout, list[Sample], Scores]:
        """Samples what the step trains on, and has it judged; this process's rows.

        Where an algorithm has iterations, the policy becomes the reference, which samples, as one begins.
        """
        if hasattr(self.algo, "iteration_start") and 0 < step == self.algo.iteration_start(self.config.hyper, step):
            self._renew_reference()
        found = self._collected = self.collector.collect(step)
        results = [result for group in found.groups for result in group.ended_results()]
        prompts = [sample.prompt for sample in found.samples]
        versions = [group.version for group in found.groups for _ in group.results]
        vocab = self.plan.models["actor"].config.vocab if self.plan.record_kept else None
        rollout = assemble(prompts, results, found.samples, versions, vocab)
        return with_answers(rollout, prompts) if self.plan.answers else rollout, found.samples, found.scores

    def _renew_reference(self) -> None:
        """Makes the policy its own reference."""
        self._layouts["reference"].free()
        self.opponent = None
        self._copy = self._copy or make_copy(self.plan, "reference")
        self.parking.renew("reference", self._copy(self.states["actor"].params))

    # What the collector samples with.

    @contextlib.contextmanager
    def laid_out(self, role: str = "") -> Iterator[Params]:
        """A role's weights, by default the sampler's, laid out for sampling as long as the block runs."""
        role = role or self.plan.sampler
        with self.timeline.phase("repartition"):
            self.parking.leave(role)
            params = self._layouts[role].of(self.weights(role), wait=True)
            params = self._engines[role].group.take(params, self.plan.models[role].axes)
        yield params
        self._layouts[role].done()
        self.parking.come_back()  # while rewards are computed

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of the rollout, for the timeline."""
        return self.timeline.phase(name)

    def respond(
        self,
        params: Params,
        asked: Sequence[Ask],
        finished: Callable[[int, Result], None],
        enough: Callable[[int], bool] | None,
    ) -> list[Result]:
        """Samples responses of the step."""
        with self.timeline.phase("sample"):
            engine = self._engines[self.plan.sampler]
            found = engine.sample(params, asked, self.sampling, seed=self.config.seed, finished=finished, enough=enough)
        self._stats.append(engine.stats)
        return found

    def generate(
        self,
        prompts: Sequence[Prompt],
        ids: Sequence[int],
        groups: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        version: int,
        role: str = "actor",
    ) -> tuple[Rollout, list[Sample]]:
        """Samples a response to each prompt with a role's current weights; see ``Engine.generate``.

        Rewards that judge few samples a call begin as soon as those have ended (see ``Scorer.begin``).
        """
        scoring = self._scoring = self.scorer.begin(len(prompts))
        places = {number: place for place, number in enumerate(ids)}
        with self.laid_out(role) as params, self.timeline.phase("sample"):
            return self._engines[role].generate(
                params,
                prompts,
                sampling,
                seed=seed,
                sample_ids=ids,
                groups=groups,
                version=version,
                finished=lambda sample: scoring.add(places[sample.sample_id], sample),
            )

    def reward(self, samples: Sequence[Sample]) -> Scores:
        """Scores of what was just sampled; NaN marks an invalid one, such as a row whose logits were not finite."""
        with self.timeline.phase("reward"):
            scores = self._scoring.result()
        broken = np.array([sample.finish == "invalid" for sample in samples], bool)
        return dataclasses.replace(scores, total=np.where(broken, np.float32(np.nan), scores.total))

    def score(self, role: str, rollout: Rollout) -> PyTree:
        """A model's scores of placed rows."""
        assert self._placed is not None
        packed = Packed(rollout, self._placed.layout)
        return self.programs.score[role](self.weights(role), packed, self._temperature)

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
        self._updated(role, *self.programs.update[role](self.states[role], minibatch, self._temperature))

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
        fetched = self._fetch(facts)
        found, updates = fetched.facts, fetched.updates
        updates |= packing_figures(self.mover.filled, self.plan.train.row_shards)
        found["kl_coef"] = self.kl_coef
        self._adapt(found, self.plan.rows)
        own = reward_sums(rewards, samples) | engine_sums(self._stats) | self._collected.sums
        own |= moved_sums(self.layout.moved if self._stats else None)  # rows that waited need no sampling
        self._stats = []
        own["bytes_per_process"] = self._held, 1
        found |= spread(totals(self.hosts.gather("metrics of a step", own)))
        self.record.add(grouped("rollout", found))
        self.record.add(grouped("train", updates))
        every = self.config.report.samples_every
        if every and step % every == 0:
            assert self._placed is not None
            has_any = hasattr(batch, "advantages")
            advantages = self.mover.own(self._mean_advantages(batch), self._placed) if has_any else None
            self.samples.write(step, "train", samples, rewards.total, rewards.rewards, advantages)
        self._check_headway(fetched)

    def _adapt(self, found: Mapping[str, float], rows: int) -> None:
        """Steers the price of the divergence by what the rollout showed."""
        if "kl_response" in found:
            self.kl_coef = float(self.config.hyper.kl.adapted(self.kl_coef, found["kl_response"], rows))
