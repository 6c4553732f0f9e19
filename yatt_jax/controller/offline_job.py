"""The job of a run on given rows, and the operations that its loop is written in."""

from __future__ import annotations

from yatt_jax.config import OfflineRun
from yatt_jax.controller.hosts import Sums, totals
from yatt_jax.controller.job import Job, Source
from yatt_jax.controller.offline_plan import OfflinePlan
from yatt_jax.controller.offline_programs import OfflinePrograms, make_offline_programs
from yatt_jax.controller.offline_rows import Feeder, open_rows
from yatt_jax.data.collate import Draw
from yatt_jax.report.metrics import grouped
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
        self._feeder = Feeder(self.plan, self.hosts)
        self._sums: Sums = {}

    @property
    def config(self) -> OfflineRun:
        """The run's configuration."""
        return self.plan.config

    # What the loop is written in.

    def draw(self) -> PyTree:
        """The rows of the next step, on the devices."""
        with self.timeline.phase("read"):
            draw = self.rows.draw()
        rows, self._sums = self._feeder.place(draw)
        return rows

    def place(self, draw: Draw) -> PyTree:
        """Rows of the evaluation, on the devices."""
        return self._feeder.place(draw)[0]

    def score(self, role: str, rows: PyTree) -> PyTree:
        """What a model says of rows, as far as ``prepare`` reads it."""
        return self.programs.score[role](self.weights(role), rows)

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
