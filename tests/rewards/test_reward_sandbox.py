"""Programs in the sandbox: what they see, what they may use, and that nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from yatt_jax.errors import InputError
from yatt_jax.rewards.sandbox import Limits, Sandbox, SandboxError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are for Linux")

SMALL = Limits(cpu_s=10, wall_s=20, memory_mb=200, file_mb=1, disk_mb=4, output_kb=50, processes=8)
# Without namespaces, programs of a superuser run as a user that cannot look into the superuser's folders.
OPEN_PYTHON = next((p for p in (sys.executable, "/usr/bin/python3") if not os.path.realpath(p).startswith("/root")), "")


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "without namespaces"])
def sandbox(request) -> Sandbox:
    if not request.param and not OPEN_PYTHON:
        pytest.skip("no interpreter that every user can read")
    try:
        made = Sandbox(SMALL, namespaces=request.param, python="" if request.param else OPEN_PYTHON)
    except InputError as error:
        pytest.skip(str(error))
    if request.param and made.run("", "").missing:
        pytest.skip("the kernel gives no namespaces here")
    return made


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    """No process and no folder outlives a test."""
    folder = tmp_path_factory.mktemp("boxes")
    for one in (folder, *folder.parents):
        if one.stat().st_uid == os.getuid() and one.stat().st_mode & 0o001 == 0:
            one.chmod(0o711)  # programs of a superuser run as another user
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    left = list(folder.iterdir())
    if left and all(not any(one.iterdir()) for one in left):
        left = []  # of a process that was killed, which cannot remove it
    assert left == []
    assert programs(folder) == []


def programs(folder: Path) -> list[str]:
    """Command lines of what runs in sandboxes below a folder, and of keepers of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text().replace("\0", " ")
            status = (entry / "status").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if str(folder) in command or ("keeper.py" in command and f"PPid:\t{os.getpid()}\n" in status):
            found.append(command)
    return found


ROOT = Path(__file__).parent.parent.parent


def test_a_program_runs(sandbox):
    outcome = sandbox.run("import sys; print(input().upper()); print('aside', file=sys.stderr); sys.exit(3)", "héllo\n")
    assert (outcome.status, outcome.reason) == (3, "")
    assert (outcome.stdout, outcome.stderr) == ("HÉLLO\n", "aside\n")


def test_it_begins_in_an_empty_folder_without_environment_or_rights(sandbox):
    program = (
        "import os\nprint(os.listdir('.'), sorted(os.environ))\n"
        "open('here', 'w').write('x'); print(open('here').read(), os.getuid() != 0)"
    )
    outcome = sandbox.run(program, "")
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("[] ['HOME', 'LANG', "), outcome
    assert "TOKEN" not in lines[0]
    assert lines[1].startswith("x "), outcome
    if os.getuid() == 0:
        assert lines[1] == "x True"


@pytest.mark.parametrize("path", ["{home}/planted", "/usr/planted", "/etc/planted", "/planted", "/dev/shm/planted"])
def test_it_writes_nowhere_else(sandbox, path, tmp_path):
    path = path.format(home=tmp_path)
    tmp_path.chmod(0o777)
    sandbox.run(f"import os; os.makedirs(os.path.dirname({path!r}), exist_ok=True); open({path!r}, 'w').write('x')", "")
    assert not os.path.exists(path)


def test_it_reads_nothing_of_the_machine(sandbox, tmp_path):
    secret = tmp_path / "gold.txt"
    secret.write_text("the answer")
    for path in (str(secret), "/etc/passwd", f"/proc/{os.getpid()}/environ"):
        outcome = sandbox.run(f"print(open({path!r}).read())", "")
        assert outcome.status == 1, path
        assert outcome.stdout == ""


def test_it_has_no_network(sandbox):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for where in (f"('127.0.0.1', {port})", "('1.1.1.1', 53)"):
            outcome = sandbox.run(f"import socket; socket.create_connection({where}, 2); print('connected')", "")
            assert outcome.status == 1
            assert outcome.stdout == ""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; print('begun', flush=True); time.sleep(60)", "time"),
        ("import sys; sys.stdin.close()\nwhile True: pass", "time"),
        pytest.param(
            "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
            "time",
            marks=pytest.mark.slow,
        ),
        ("while True: print('x' * 1000)", "output"),
    ],
    ids=["sleeps", "loops", "ignores signals", "writes"],
)
def test_what_does_not_end_is_ended(sandbox, program, reason):
    start = time.monotonic()
    outcome = sandbox.run(program, "", Limits(cpu_s=1, wall_s=1, output_kb=50))
    assert outcome.reason == reason
    assert time.monotonic() - start < 10


def test_memory(sandbox):
    assert "MemoryError" in sandbox.run("x = bytearray(10**9)", "").stderr
    # Several processes, each below the limit of one.
    program = (
        "import os, time\nfor i in range(4):\n  if os.fork() == 0:\n    x = bytearray(os.urandom(1)) * 80_000_000\n"
        "    time.sleep(30)\ntime.sleep(30)"
    )
    outcome = sandbox.run(program, "")
    assert outcome.reason == "memory"


def test_files(sandbox):
    assert "File too large" in sandbox.run("open('f', 'w').write('x' * 2_000_000)", "").stderr
    many = "for i in range(100): open(f'f{i}', 'w').write('x' * 900_000)\nprint('all')\nimport time; time.sleep(5)"
    outcome = sandbox.run(many, "")
    assert outcome.reason == "disk" or "No space left" in outcome.stderr
    assert "all" not in outcome.stdout or outcome.reason == "disk"


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        pytest.param(
            "import os\nwhile True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bomb", "stubborn bomb", "bomb of sessions"],
)
def test_fork_bombs(sandbox, program):
    start = time.monotonic()
    outcome = sandbox.run(program, "", Limits(cpu_s=2, wall_s=1, memory_mb=200, processes=8))
    assert outcome.reason in ("processes", "time", "memory") or outcome.status == 1
    assert time.monotonic() - start < 15


def test_what_it_leaves_behind_is_ended(sandbox):
    program = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    print('alive', os.getpid(), flush=True)\n    time.sleep(100)\n  os._exit(0)\nos.wait(); time.sleep(0.2)"
    )
    start = time.monotonic()
    outcome = sandbox.run(program, "")
    assert outcome.status == 0
    assert outcome.stdout.startswith("alive")
    assert time.monotonic() - start < 10


def test_it_cannot_end_its_keeper(sandbox):
    program = "import os, signal\nfor n in (os.getppid(), 1):\n  os.kill(n, signal.SIGKILL)\nprint('done')"
    outcome = sandbox.run(program, "")
    assert outcome.status in (0, 1) or outcome.reason == "killed"
    assert sandbox.run("print('next')", "").stdout == "next\n"


def test_it_ends_with_the_process_that_asked(sandbox, tmp_path):
    """The trainer is killed while a program runs."""
    script = tmp_path / "asks.py"
    namespaces = sandbox._namespaces
    script.write_text(
        "from yatt_jax.rewards.sandbox import Limits, Sandbox\n"
        f"box = Sandbox(Limits(wall_s=60), namespaces={namespaces}, python={'' if namespaces else OPEN_PYTHON!r})\n"
        "print('ready', flush=True)\nbox.run('import os, time; os.fork(); os.setsid(); time.sleep(50)', '')\n"
    )
    asks = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert asks.stdout is not None
    assert asks.stdout.readline() == "ready\n"
    ends = time.monotonic() + 20
    while len(_keepers_of(asks.pid)) == 0 and time.monotonic() < ends:
        time.sleep(0.05)
    time.sleep(0.5)
    keepers = _keepers_of(asks.pid)
    assert len(keepers) == 1
    asks.kill()
    asks.wait()
    while any(Path(f"/proc/{k}").exists() for k in keepers) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{k}").exists() for k in keepers)
    while programs(tmp_path) and time.monotonic() < ends:
        time.sleep(0.05)
    assert programs(tmp_path) == []


def _keepers_of(parent: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def test_many_at_a_time(sandbox):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda i: sandbox.run("print(int(input()) ** 2)", str(i)), range(12)))
    assert [int(outcome.stdout) for outcome in outcomes] == [i * i for i in range(12)]


def test_an_interpreter_that_is_none(tmp_path):
    with pytest.raises(InputError, match="is no Python interpreter"):
        Sandbox(SMALL, python=str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"wall_s = 0: must be above 0"):
        Limits(wall_s=0)


def test_walls_that_cannot_be_had_are_told(monkeypatch, caplog):
    """As on a kernel without Landlock: "full" refuses, "best" says what is missing and goes on."""
    from yatt_jax.rewards.sandbox import run

    answer = {"status": 0, "reason": "", "stdout": "ready\n", "stderr": "", "cpu_s": 0.0, "wall_s": 0.1}
    missing = {"namespaces": "Operation not permitted", "network": "seccomp: Invalid argument"}
    monkeypatch.setattr(run, "_keep", lambda task, limit: answer | {"missing": missing})
    with pytest.raises(InputError, match=r"kept from network: seccomp: .*\(namespaces: Operation not.*best"):
        Sandbox(SMALL)
    made = Sandbox(SMALL, isolation="best")
    assert made.missing == {"network": "seccomp: Invalid argument"}
    assert "without all walls: network" in caplog.text
    monkeypatch.setattr(run, "_keep", lambda task, limit: answer | {"missing": {}, "reason": "the sandbox broke"})
    with pytest.raises(SandboxError, match="the sandbox broke"):
        made.run("", "")
