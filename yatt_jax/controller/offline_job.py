"""The job of a run on given rows, and the operations that its loop is written in."""

from __future__ import annotations

import hashlib
import json
import shutil

from yatt_jax.config import OfflineRun
from yatt_jax.controller.hosts import Sums, totals
from yatt_jax.controller.job import Job, Source
from yatt_jax.controller.kept_scores import KeptScores
from yatt_jax.controller.offline_plan import OfflinePlan
from yatt_jax.controller.offline_programs import OfflinePrograms, make_offline_programs
from yatt_jax.controller.offline_rows import Feeder, open_rows
from yatt_jax.data.collate import Draw
from yatt_jax.report.metrics import grouped
from yatt_jax.typed import to_dict
from yatt_jax.types import Metrics, PyTree, Ratio


class OfflineJob(Job[OfflinePlan]):
    """Everything one process needs to run the offline loop; see ``Job``."""

    def _open_inputs(self) -> Source:
        self.rows = open_rows(self.plan, self.hosts)
        return self.rows

    def _make_programs(self) -> OfflinePrograms:
        self.programs = make_offline_programs(self.plan)
        return self.programs

    def _begin(self) -> None:
        self._kept = self._open_kept()
        self._feeder = Feeder(self.plan, self.hosts, numbered=bool(self._kept))
        self._sums: Sums = {}
        self._held_out = False  # whether the rows placed last are

    def _open_kept(self) -> dict[tuple[str, bool], KeptScores]:
        """Scores that a frozen model needs to give but once, by role and whether they are of held-out rows.

        Those of training rows are in files of the run directory, by what they depend on. They are kept where the run
        sees its rows more than once, and where the algorithm reads but a few numbers of each.
        """
        config, (train, held_out) = self.config, self.rows.records
        if not hasattr(self.algo, "summary"):
            return {}
        roles = [role for role in self.algo.scored_by(config.hyper) if role in self.frozen]
        kept = {(role, True): KeptScores(held_out) for role in roles}
        if config.steps > self.rows.steps_per_epoch:
            said = json.dumps([to_dict(config.data), to_dict(config.model), self._reference], sort_keys=True)
            folder, name = self.run.path / "scores", hashlib.sha256(said.encode()).hexdigest()[:16]
            if not self.resumed and self.hosts.is_main:
                shutil.rmtree(folder, ignore_errors=True)
            self.hosts.barrier("scores of an earlier run are gone")
            for role in roles:
                file = folder / f"{role}-{name}"
                kept[role, False] = KeptScores(train, file, writes=self.hosts.is_main)
        return kept

    @property
    def config(self) -> OfflineRun:
        """The run's configuration."""
        return self.plan.config

    # What the loop is written in.

    def draw(self) -> PyTree:
        """The rows of the next step, on the devices."""
        with self.timeline.phase("read"):
            draw = self.rows.draw()
        self._held_out = False
        rows, self._sums = self._feeder.place(draw)
        return rows

    def place(self, draw: Draw) -> PyTree:
        """Rows of the evaluation, on the devices."""
        self._held_out = True
        return self._feeder.place(draw)[0]

    def score(self, role: str, rows: PyTree) -> PyTree:
        """What a model says of the rows placed last, as far as ``prepare`` reads it."""
        kept, numbers = self._kept.get((role, self._held_out)), self._feeder.numbers
        if kept is None:
            return self.programs.score[role](self.weights(role), rows)
        if all(self.hosts.gather("scores that are kept", kept.have(numbers))):
            return self._feeder.spread(kept.get(numbers))
        scores = self.programs.score[role](self.weights(role), rows)
        kept.put(numbers, self._feeder.everywhere(scores))
        return scores

    def prepare(self, rows: PyTree, scores: dict[str, PyTree]) -> tuple[PyTree, Metrics]:
        """The algorithm's batch, and facts about the rows."""
        return self.programs.prepare(rows, scores)

    def update(self, role: str, batch: PyTree) -> None:
        """One optimizer step of a role; its metrics stay on the devices until the step is reported."""
        self._updated(role, *self.programs.update[role](self.states[role], batch))

    def measure(self, batch: PyTree) -> dict[str, Ratio]:
        """The metrics of the model that is trained, row by row; see ``OfflinePrograms.measure``."""
        return self.programs.measure(self.weights(self.plan.first), batch)

    def report(self, step: int, facts: Metrics) -> None:
        """Brings the step's metrics to the host and checks them; ``write`` puts them out.

        Raises:
          RunFailure: too many updates in a row were skipped for a non-finite loss or gradient.
        """
        fetched = self._fetch(facts)
        skipped: Sums = {f"skipped/{why}": (count, None) for why, count in self.rows.skipped.items()}
        added = totals(self.hosts.gather("metrics of a step", self._sums | skipped))
        found = {name: value for name, value in added.items() if value or name not in skipped}
        found["epoch"] = step / self.rows.steps_per_epoch
        self.record.add(grouped("data", fetched.facts | found))
        self.record.add(grouped("train", fetched.updates))
        self._check_headway(fetched)
