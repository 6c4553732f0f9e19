"""The command: ``python -m yatt_jax.main --config=configs/NAME.py[:variant] --workdir=DIR [--config.KEY=VALUE ...]``.

``--dry_run`` prints what a run would do and how much memory it needs, without loading weights. The exit status is 0
after a finished run, 2 for bad input (the message says what and how to mend it), 1 when the run itself failed, and 75
when it was told to stop (SIGTERM, ``config.max_minutes``) and has saved: the same command goes on.

A job of several processes runs the same command in each, with ``--distributed`` on a cluster that jax knows (Slurm,
Open MPI, Cloud TPU, Kubernetes), or with ``--coordinator``, ``--processes`` and ``--process``; see ``launch/``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from yatt_jax import config as configuration
from yatt_jax.command import parse_flags, reason, use_compilation_cache
from yatt_jax.errors import InputError, RunFailure, told

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    "config", None, "Config file, with a variant after a colon if it has any.", lock_config=True
)
flags.DEFINE_string("workdir", None, "Where the run writes: metrics, samples, report.html, the exported model.")
flags.DEFINE_bool("overwrite", False, "Discard an earlier run in --workdir and start anew.")
flags.DEFINE_string("resume", "latest", "Where to go on: latest (checkpoint in --workdir), never, or a step.")
flags.DEFINE_bool("dry_run", False, "Print the resolved config, sizes and memory by role, and stop.")
flags.DEFINE_bool("distributed", False, "Join the other processes of the cluster that this one was started in.")
flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, to join a job without a cluster's help.")
flags.DEFINE_integer("processes", 0, "With --coordinator: the number of processes.")
flags.DEFINE_integer("process", -1, "With --coordinator: the number of this process, from 0.")


def main(argv: Sequence[str]) -> None:
    """Runs the job that the flags describe."""
    if len(argv) > 1:
        raise configuration.ConfigError(f"unexpected argument {argv[1]!r}: settings are given as --config.KEY=VALUE")
    if not FLAGS["config"].present:
        raise configuration.ConfigError("--config is missing: name a file, as --config=configs/ppo_smollm2.py")
    if not FLAGS.workdir and not FLAGS.dry_run:
        raise configuration.ConfigError("--workdir is missing: name a folder for the run, as --workdir=runs/first")
    try:
        config = configuration.parse(FLAGS.config)
    except OSError as error:  # a file that does not load shows itself only now when no key is overridden
        raise configuration.ConfigError(reason(error)) from error
    _check_process()
    use_compilation_cache(config.compilation_cache)
    # The models are imported only now, so that a faulty config is reported at once.
    from yatt_jax.controller.hosts import join
    from yatt_jax.controller.plan import make_plan
    from yatt_jax.controller.start import check_inputs, run

    with join(config.controller, FLAGS.coordinator, FLAGS.processes, FLAGS.process, detect=FLAGS.distributed) as hosts:
        plan = make_plan(config)
        if FLAGS.dry_run:
            told = check_inputs(plan, hosts)
            if hosts.is_main:
                print(plan.describe(), *(f"  {line}" for line in told), sep="\n")
            return
        status = run(plan, Path(FLAGS.workdir), hosts, resume=FLAGS.resume, overwrite=FLAGS.overwrite)
    sys.exit(status)


def _check_process() -> None:
    """``--coordinator``, ``--processes`` and ``--process`` come together."""
    count, number = FLAGS.processes, FLAGS.process
    if not FLAGS.coordinator:
        if count or number != -1:
            raise configuration.ConfigError("--processes and --process need --coordinator=HOST:PORT")
        return
    if FLAGS.distributed:
        raise configuration.ConfigError("--coordinator and --distributed: give one of them")
    if not re.fullmatch(r".+:\d+", FLAGS.coordinator):
        raise configuration.ConfigError(f"--coordinator={FLAGS.coordinator}: expected HOST:PORT")
    if not 0 <= number < count:
        raise configuration.ConfigError(f"--process={number} --processes={count}: expected 0 <= process < processes")


def run_command() -> None:
    """Entry point of the command."""
    logging.set_verbosity(logging.WARNING)  # libraries tell every step of a checkpoint
    known = ["config", "workdir", "overwrite", "resume", "dry_run", "distributed", "coordinator", "processes"]
    try:
        app.run(main, flags_parser=lambda argv: parse_flags(argv, known))
    except (InputError, RunFailure) as error:
        print(f"{'error' if error.status == 2 else 'stopped'}: {told(error)}", file=sys.stderr)
        sys.exit(error.status)


if __name__ == "__main__":
    run_command()
