"""The offline loop: read, score, update; to be read as the algorithm box of a paper."""

from __future__ import annotations

from yatt_jax.controller.offline_evaluate import evaluate
from yatt_jax.controller.offline_job import OfflineJob


def train(job: OfflineJob) -> None:
    """Runs the job from its first step to its last.

    Raises:
      StopRequested: the run was told to stop; see ``Job.stoppable``.
      RunFailure: too many non-finite updates in a row, or a checkpoint that could not be written.
      DataError: a row that the configuration does not allow to leave out.
    """
    algo, hyper = job.algo, job.config.hyper
    if not job.resumed:
        evaluate(job, 0)
        job.write(0)
    for step in range(job.first_step, job.config.steps):
        with job.phase("data"):
            rows = job.draw()
        with job.phase("score"):
            scores = {role: job.score(role, rows) for role in algo.scored_by(hyper)}
            batch, facts = job.prepare(rows, scores)
        with job.phase("train"):
            for role in algo.trains(hyper, step):
                job.update(role, batch)
            job.report(step + 1, facts)
        evaluate(job, step + 1)
        job.write(step + 1)
        if job.save(step + 1):
            break
    job.finish()
