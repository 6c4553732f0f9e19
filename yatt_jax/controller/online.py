"""The online loop: sample, score, update; to be read as the algorithm box of a paper."""

from __future__ import annotations

from yatt_jax.controller.evaluate import evaluate
from yatt_jax.controller.online_job import OnlineJob


def train(job: OnlineJob) -> None:
    """Runs the job from its first step to its last.

    Raises:
      StopRequested: the run was told to stop; see ``Job.stoppable``.
      RunFailure: too many non-finite updates in a row, or a checkpoint that could not be written.
      RewardError: a reward failed, and the configuration does not count failures.
    """
    algo, hyper = job.algo, job.config.hyper
    if not job.resumed:
        evaluate(job, 0)
        job.write(0)
    for step in range(job.first_step, job.config.steps):
        with job.phase("rollout"):  # the actor laid out for sampling
            rollout, samples, rewards = job.collect(step)
        with job.phase("score"):
            rows, row_rewards = job.place(rollout, rewards)
            scores = {role: job.score(role, rows) for role in algo.scored_by(hyper)}
            batch, facts = job.prepare(rows, row_rewards, scores)
        with job.phase("train"):  # actor and critic laid out for training
            for minibatch in job.minibatches(batch, step):
                for role in algo.trains(hyper, step):
                    job.update(role, minibatch)
                if job.far_enough():
                    break
            job.report(step + 1, samples, rewards, batch, facts)
        evaluate(job, step + 1)
        job.write(step + 1)
        if job.save(step + 1):
            break
    job.finish()
