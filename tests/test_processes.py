"""The harness of the many-process tests: output, failures, deadlines, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.processes import run_processes, start_processes


def greet() -> None:
    import os

    print(os.environ["YATT_TEST_PROCESS"], os.environ["YATT_TEST_PROCESSES"], os.environ["JAX_NUM_CPU_DEVICES"])


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_functions_source_and_commands_run() -> None:
    assert [one.stdout for one in run_processes(greet, 2, 3)] == ["0 2 3\n", "1 2 3\n"]
    assert run_processes("import os\nprint(os.environ['A'])", 1, 1, env={"A": "b"})[0].stdout == "b\n"
    command = ["-c", "import sys; print(sys.argv[1:])", "--process={process}/{processes}", "{coordinator}"]
    for i, one in enumerate(run_processes(command, 2, 1)):
        assert one.stdout.startswith(f"['--process={i}/2', '127.0.0.1:")


def test_a_failure_shows_its_output() -> None:
    program = "import os\nif os.environ['YATT_TEST_PROCESS'] == '1': raise SystemExit('the end of it')"
    with pytest.raises(AssertionError, match=r"processes \[1\] failed(.|\n)*the end of it"):
        run_processes(program, 2, 1)
    assert [one.returncode for one in run_processes(program, 2, 1, check=False)] == [0, 1]


def test_what_hangs_is_killed_at_its_deadline() -> None:
    begin = time.monotonic()
    with start_processes("import time\nprint('here', flush=True)\ntime.sleep(60)", 2, 1) as group:
        pids = [child.pid for child in group.children]
        group.wait_for_text(0, "here", 20)
        group.wait_for_text(1, "here", 20)
        group.signal(1, signal.SIGSTOP)
        with pytest.raises(AssertionError, match=r"still running after 0.1 s(.|\n)*here"):
            group.wait(0.1)
        with pytest.raises(AssertionError, match="did not write 'there'"):
            group.wait_for_text(0, "there", 0.1)
        group.signal(0, signal.SIGKILL)
        assert group.wait(20, [0])[0].returncode == -signal.SIGKILL
    assert time.monotonic() - begin < 50
    assert all(gone(pid) for pid in pids)
