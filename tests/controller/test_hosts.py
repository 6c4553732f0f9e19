"""Agreements between processes, and how the watch's times follow from its one setting."""

from __future__ import annotations

import math
import re
import time

import pytest

from tests.processes import run_processes, start_processes
from yatt_jax.controller.hosts import Hosts, join, totals
from yatt_jax.controller.watch import ControllerConfig, Member, Verdict


def agree() -> None:
    """Three processes: agreements of all and of two; then they disagree."""
    import os
    import time

    import pytest

    from yatt_jax.controller.hosts import join
    from yatt_jax.controller.watch import ControllerConfig
    from yatt_jax.errors import RunFailure

    process = int(os.environ["YATT_TEST_PROCESS"])
    config = ControllerConfig(timeout_s=8.0, straggler_s=3.0)
    with join(config, os.environ["YATT_TEST_COORDINATOR"], 3, process) as hosts:
        for i in range(3):
            assert hosts.gather("numbers", [process, i, float("nan")])[2][:2] == [2, i]
        if process < 2:
            assert hosts.gather("of two", process, among=[0, 1]) == [0, 1]
        assert hosts.gather("text", "ä" * 10000)[process] == "ä" * 10000
        with pytest.raises(RunFailure, match="different agreements"):
            hosts.gather("one thing" if process else "another", None)
        hosts.barrier("all together again")
        if process < 2:
            with pytest.raises(RunFailure, match=r"for process 2 \(host .*straggler_s"):
                hosts.barrier("in time")
            print("late")
        time.sleep(4 if process == 2 else 2)
        os._exit(0)  # nobody waits for the straggler


def test_agreements_of_processes() -> None:
    done = run_processes(agree, 3, 1, timeout=60, check=False)
    assert sum("late" in one.stdout for one in done) == 2


def meet_an_end() -> None:
    """Three processes; the one of ``YATT_TEST_END`` dies, stops or raises while the others wait for it."""
    import os
    import signal
    import time

    from yatt_jax.controller.hosts import join
    from yatt_jax.controller.watch import ControllerConfig

    kind, which = os.environ["YATT_TEST_END"].split()
    process = int(os.environ["YATT_TEST_PROCESS"])
    with join(ControllerConfig(timeout_s=6.0), os.environ["YATT_TEST_COORDINATOR"], 3, process) as hosts:
        hosts.note("rollout", 7)
        hosts.barrier("the start")
        if process == int(which):
            hosts.note("score", 8)
            time.sleep(1)
            print("now", flush=True)
            if kind == "raise":
                raise ArithmeticError("the fault of this test")
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        hosts.barrier("what never comes")


ENDS = [(kind, which) for kind in ("kill", "stop", "raise") for which in (0, 1)]
QUICK = [("kill", 1), ("stop", 0), ("raise", 1)]


@pytest.mark.parametrize(
    ("kind", "which"), [*QUICK, *(pytest.param(*end, marks=pytest.mark.slow) for end in ENDS if end not in QUICK)]
)
def test_the_end_of_one_process_is_the_end_of_all(kind: str, which: int) -> None:
    with start_processes(meet_an_end, 3, 1, env={"YATT_TEST_END": f"{kind} {which}"}) as group:
        group.wait_for_text(which, "now", 60)
        begun = time.monotonic()
        ended = group.wait(20, [p for p in range(3) if p != which])
        assert time.monotonic() - begun < 6.0 + 3.0  # the interpreters take a moment to end
        for one in ended:
            assert one.returncode == 1
            found = re.search(
                r"stopped: process (\d) \(host \S+, phase (\w+), step (\d)\) (failed|was lost)", one.stderr
            )
            assert found, one.stderr[-3000:]
            assert found.groups() == (str(which), "score", "8", "failed" if kind == "raise" else "was lost")
            assert ("ArithmeticError: the fault of this test" in one.stderr) == (kind == "raise")


def test_a_job_of_one_process_agrees_with_itself() -> None:
    hosts = join(ControllerConfig())
    with hosts:
        assert (hosts.process, hosts.count, hosts.is_main) == (0, 1, True)
        assert hosts.gather("x", {"a": (1, 2)}) == [{"a": [1, 2]}]
        hosts.barrier("y")


def test_an_error_passes_through_a_job_of_one_process() -> None:
    with pytest.raises(KeyError), Hosts():
        raise KeyError("x")


def test_a_process_that_does_not_come_ends_the_wait() -> None:
    def lonely() -> None:
        import os

        import pytest

        from yatt_jax.controller.hosts import join
        from yatt_jax.controller.watch import ControllerConfig
        from yatt_jax.errors import RunFailure

        with pytest.raises(RunFailure, match="did not come together"):
            join(ControllerConfig(straggler_s=2.0), os.environ["YATT_TEST_COORDINATOR"], 2, 0)
        print("said")
        os._exit(0)

    (done,) = run_processes(lonely, 1, 1, timeout=60)
    assert "said" in done.stdout


def test_figures_are_added_over_processes() -> None:
    parts = [{"mean": (3.0, 2), "sum": (1.0, None)}, {"mean": (5.0, 2), "sum": (2.0, None), "none": (0.0, 0)}]
    found = totals(parts)
    assert found["mean"] == 2.0
    assert found["sum"] == 3.0
    assert math.isnan(found["none"])


def test_the_watch_ends_a_job_within_its_timeout() -> None:
    for timeout in (2.0, 12.0, 60.0, 600.0):
        config = ControllerConfig(timeout_s=timeout)
        # Silence is noticed at a beat, read by the others at another one, and process 0 lingers for four.
        assert config.silence_s + 6 * config.beat_s <= timeout
        assert config.suspect_silence_s <= config.silence_s
    with pytest.raises(ValueError, match="timeout_s = 1: must be at least 2"):
        ControllerConfig(timeout_s=1)


def test_a_verdict_names_process_host_and_phase() -> None:
    verdict = Verdict(Member(3, "tpu-7", "train", 12), "lost", "it has shown no sign of life for 36 s", 1)
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert verdict.message(Member(0, "tpu-4", "train", 12)) == (
        "stopped: process 3 (host tpu-7, phase train, step 12) was lost; this is process 0 (host tpu-4, phase train, "
        "step 12)\nit has shown no sign of life for 36 s"
    )


def test_no_cluster_is_an_input_error() -> None:
    def lost() -> None:
        import os

        import pytest

        from yatt_jax.controller.hosts import join
        from yatt_jax.controller.watch import ControllerConfig
        from yatt_jax.errors import InputError

        with pytest.raises(InputError, match="not started in a cluster"):
            join(ControllerConfig(), detect=True)
        print("said")
        os._exit(0)

    (done,) = run_processes(lost, 1, 1, timeout=60)
    assert "said" in done.stdout
