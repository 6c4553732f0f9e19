"""Mathematical equality in worker processes: right answers, threads, and time limits that hold."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from yatt_jax.errors import InputError
from yatt_jax.rewards import Invalid, RewardSpec, build, rules
from yatt_jax.rewards.verify import Verifier

LIMIT_S = 20.0  # generous: the machine may be busy


@pytest.fixture(scope="module")
def verifier():
    made = Verifier(2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        (r"\frac{1}{3}", r"\frac{1}{3}", 1),
        (r"\frac{1}{3}", r"So we get $\boxed{\frac{2}{6}}$.", 1),
        ("1/3", "the answer is 1/3", 1),
        ("1/3", "the answer is 0.33", 0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1),
        (r"$x^2+2x+1$", r"\boxed{(x+1)^2}", 1),
        ("42", "first 41, so 42", 1),
        ("42", "41", 0),
        ("10%", r"$10\%$", 1),
        ("3", "$x = 3$", 1),
        ("3", "", 0),
    ],
)
def test_equality(verifier, gold, text, score):
    assert verifier.judge([([gold], text)], LIMIT_S) == [score]


def test_any_of_several_answers(verifier):
    assert verifier.judge([(["7", r"\frac12"], "$0.5$"), (["7", "8"], "9")], LIMIT_S) == [1, 0]


def test_an_answer_that_is_no_mathematics(verifier):
    (got,) = verifier.judge([(["$$"], "3")], LIMIT_S)
    assert isinstance(got, Invalid)
    assert "no mathematical expression" in got.reason


def test_in_a_thread(sample):
    """Field lesson 12: signals failed inside threads, and every reward was a silent 0."""
    samples = [
        sample(r"It is $\frac{1}{3}$", answer=r"\frac{1}{3}"),
        sample("$0.5$", answer="1/2"),
        sample("4", answer=5),
    ]
    results = []
    thread = threading.Thread(target=lambda: results.append(rules.math_equal(samples, timeout_s=LIMIT_S)))
    thread.start()
    thread.join()
    assert results == [[1, 1, 0]]
    scorer = build(
        {"math": RewardSpec("yatt_jax.rewards.rules:math_equal", kwargs={"timeout_s": LIMIT_S}, chunk=1)}, workers=3
    )
    np.testing.assert_array_equal(scorer(samples).total, [1, 1, 0])
    scorer.close()


def test_the_pool_is_reused(verifier):
    verifier.judge([(["1"], "1")] * 4, LIMIT_S)
    before = [worker._process.pid for worker in verifier._workers if worker._process]
    verifier.judge([(["1"], "1")] * 8, LIMIT_S)
    assert [worker._process.pid for worker in verifier._workers if worker._process] == before


def test_a_hung_check_is_killed_and_counted(sample):
    samples = [sample("$2$", answer=2), sample("$9^{9^{9^{9}}}$", answer=1), sample("$3$", answer=3)]
    scorer = build({"math": RewardSpec("yatt_jax.rewards.rules:math_equal", kwargs={"timeout_s": LIMIT_S})})
    scorer(samples[:1])  # starts the processes
    start = time.monotonic()
    fast = {"timeout_s": 3.0}
    scores = build({"math": RewardSpec("yatt_jax.rewards.rules:math_equal", kwargs=fast)})(samples)
    assert time.monotonic() - start < 30
    assert np.isnan(scores.total).tolist() == [False, True, False]
    assert scores.total[[0, 2]].tolist() == [1, 1]
    assert scores.invalid == {"math": 1}
    assert scores.reasons == {"math: stopped at the time limit of 3 s": 1}


@pytest.mark.slow
def test_the_kernel_ends_a_hung_check_whose_parent_is_gone():
    worker = Verifier(1)._workers[0]
    worker.ask(["1"], "1", LIMIT_S)
    process = worker._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.write(b'{"golds": ["1"], "text": "$9^{9^{9^{9}}}$", "limit_s": 0.1}\n')
    process.stdin.close()
    assert process.wait(timeout=300) == -signal.SIGXCPU


def test_a_stopped_process_counts_as_hung():
    verifier = Verifier(1)
    verifier.judge([(["1"], "1")], LIMIT_S)
    process = verifier._workers[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    start = time.monotonic()
    (got,) = verifier.judge([(["1"], "1")], 0.5)
    assert time.monotonic() - start < 10
    assert got == Invalid("stopped at the time limit of 0.5 s")
    assert process.poll() == -signal.SIGKILL
    assert verifier.judge([(["1"], "1")], LIMIT_S) == [1]  # by a new process
    verifier.close()


def test_a_process_that_dies_is_replaced():
    verifier = Verifier(1)
    verifier.judge([(["1"], "1")], LIMIT_S)
    process = verifier._workers[0]._process
    assert process is not None
    process.kill()
    process.wait()
    assert verifier.judge([(["1"], "1")], LIMIT_S) == [1]
    verifier.close()
    assert verifier._workers[0]._process is None


def test_workers_end_with_their_parent():
    verifier = Verifier(1)
    verifier.judge([(["1"], "1")], LIMIT_S)
    process = verifier._workers[0]._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # what the end of the parent does
    assert process.wait(timeout=20) == 0
    verifier.close()


def test_long_texts_and_several_callers(verifier):
    long = "word " * 40_000 + r"so \boxed{7}"
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: verifier.judge([([str(i)], f"${i}$"), (["7"], long)], 60), range(4)))
    assert found == [[1, 1]] * 4


def test_a_worker_that_cannot_start(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the math verifier did not start"):
        Verifier(1).judge([(["1"], "1")], LIMIT_S)


def test_settings(sample):
    wrong: list[dict[str, Any]] = [{"processes": 0}, {"timeout_s": 0.0}]
    for given in wrong:
        with pytest.raises(InputError, match="must be above 0"):
            rules.math_equal([sample("1", answer=1)], **given)
