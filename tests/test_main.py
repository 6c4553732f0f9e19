"""The command as users type it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIGITS = "--config=configs/ppo_digits.py:tiny"
SFT = "--config=configs/sft.py:tiny"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "yatt_jax.main", *arguments, "--config.compilation_cache="]
        if any(a.startswith("--config=") for a in arguments)
        else [sys.executable, "-m", "yatt_jax.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


BAD = {
    "no config": ([], "error: --config is missing"),
    "no workdir": ([DIGITS], "error: --workdir is missing"),
    "misspelt file": (["--config=configs/ppo_digit.py"], "did you mean 'configs/ppo_digits.py'?"),
    "unknown variant": (["--config=configs/ppo_digits.py:tin"], "no variant 'tin'"),
    "unknown key": ([DIGITS, "--config.stepz=3", "--workdir={tmp}/w"], "steps"),
    "wrong type": ([DIGITS, "--config.steps=many", "--workdir={tmp}/w"], "steps"),
    "out of range": ([DIGITS, "--config.hyper.gamma=2.0", "--workdir={tmp}/w"], "gamma = 2.0"),
    "no data": ([DIGITS, "--config.data.train={tmp}/none.jsonl", "--workdir={tmp}/w"], "none.jsonl"),
    "empty data": ([DIGITS, "--config.data.train={tmp}/empty.jsonl", "--workdir={tmp}/w"], "empty.jsonl"),
    "malformed line": ([DIGITS, "--config.data.train={tmp}/bad.jsonl", "--workdir={tmp}/w"], "bad.jsonl:2"),
    "rows of another kind": (
        [SFT, "--config.data.train=configs/data/digits_pairs_train.jsonl", "--workdir={tmp}/w"],
        "digits_pairs_train.jsonl:1",
    ),
    "no teacher": (
        ["--config=configs/distill_teacher.py:tiny", "--config.model.teacher=", "--workdir={tmp}/w"],
        "teacher",
    ),
    "a file as workdir": ([DIGITS, "--workdir={tmp}/bad.jsonl"], "bad.jsonl"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """All bad commands, two at a time: starting Python is most of the work."""
    tmp = tmp_path_factory.mktemp("bad")
    (tmp / "empty.jsonl").write_text("")
    (tmp / "bad.jsonl").write_text('{"prompt": "123"}\n{"prompt": \n')
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            name: pool.submit(command, *(a.replace("{tmp}", str(tmp)) for a in arguments))
            for name, (arguments, _) in BAD.items()
        }
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_message(name: str, outcomes: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = outcomes[name]
    assert done.returncode == 2, done.stderr
    assert BAD[name][1] in done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_dry_run_of_rows_says_how_long_an_epoch_is() -> None:
    done = command(SFT, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "an epoch has 10 steps" in done.stdout


def test_a_tiny_run_from_the_command_line_and_a_chat_with_its_result(tmp_path: Path) -> None:
    done = command(DIGITS, f"--workdir={tmp_path}/run", "--config.steps=1", "--config.evaluation.every=1")
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()
    talk = subprocess.run(
        [sys.executable, "-m", "tools.chat", f"{tmp_path}/run", "--once", "123", "--max_new_tokens", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.endswith("\n")
