"""Rewards over HTTP, from servers that are well, slow, busy, broken or not there."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.rewards import stand_in
from tests.rewards.stand_in import lengths, standing_in, status
from yatt_jax.errors import InputError
from yatt_jax.rewards import RewardError, RewardSpec, Scorer, build

QUICK = {"timeout_s": 0.5, "deadline_s": 8.0, "tries": 4, "pause_s": 0.02, "longest_pause_s": 0.1, "revive_s": 0.3}


def remote(*urls: str, on_error: Any = "raise", workers=1, chunk=0, patience=QUICK, **kwargs) -> Scorer:
    settings = {"urls": urls, "patience": patience, **kwargs}
    spec = RewardSpec("yatt_jax.rewards.remote:Remote", kwargs=settings, chunk=chunk)
    return build({"far": spec}, on_error=on_error, workers=workers)


@pytest.fixture
def texts(sample):
    """Samples of 1, 2, 3, ... characters."""
    return lambda count: [sample(f"{i:0{i + 1}}") for i in range(count)]


def test_each_sample_is_scored_once_and_gets_its_own_reward(texts):
    samples = texts(23)
    with standing_in() as server:
        scorer = remote(server.url, batch=4, concurrency=3)
        scores = scorer(samples)
        scorer.close()
        assert scores.total.tolist() == [len(s.completion) for s in samples]
        assert server.scored == {s.completion: 1 for s in samples}
        assert sorted(len(r["samples"]) for r in server.requests) == [3, 4, 4, 4, 4, 4]
    assert scores.counts == {"far/retries": 0, "far/servers_dropped": 0}


def test_what_is_sent(sample):
    one = sample("yes", text="right?", gold="y", other=object())
    with standing_in() as server:
        scorer = remote(server.url, columns=("gold",))
        scorer([one])
        scorer.close()
        assert server.requests == [
            {
                "samples": [
                    {
                        "sample_id": 0,
                        "prompt": "right?",
                        "messages": [],
                        "completion": "yes",
                        "finish": "stop",
                        "columns": {"gold": "y"},
                    }
                ]
            }
        ]
        assert "Authorization" not in server.headers[0]
        with pytest.raises(InputError, match=r"p\.jsonl:1: the record has no field 'silver'.*\['gold', 'other'\]"):
            remote(server.url, columns=("silver",))([one])
        with pytest.raises(InputError, match="holds what JSON cannot: Object of type object"):
            remote(server.url, columns=("other",))([one])


@pytest.mark.parametrize("form", ["sentences", "tokens"])
def test_fields_of_nemo_aligner(sample, form):
    sent = {
        "sentences": {"sentences": ["questionab", "questionabc"]},
        "tokens": {"tokens": [[1, 7, 7, 7, 0], [1, 7, 7, 7, 7]], "sequence_lengths": [4, 5]},
    }
    with standing_in(otherwise=stand_in.says(b'{"rewards": [[0.5], [1.5]], "exceeded": [false, false]}')) as server:
        scorer = remote(server.url, format=form, path="/infer")
        assert scorer([sample("ab"), sample("abc")]).total.tolist() == [0.5, 1.5]
        scorer.close()
        assert server.requests == [sent[form]]
        assert server.headers[0]["path"] == "/infer"


def test_attributes_are_weighed_and_null_is_invalid(sample):
    with standing_in(stand_in.says(b'{"scores": [[1, 2, 4], null]}')) as server:
        scorer = remote(server.url, field="scores", attribute_weights=(1.0, 0.5, -0.25))
        scores = scorer([sample("a"), sample("b")])
        scorer.close()
    np.testing.assert_allclose(scores.total, [1.0, np.nan])
    assert scores.reasons == {"far: the server gave null": 1}


@pytest.mark.parametrize(
    "fault",
    [
        status(429, Retry_After="0.05"),
        status(429),
        status(500),
        status(502),
        status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        stand_in.half,
        stand_in.hang_up,
        stand_in.sleep(1.0),
        stand_in.drip(1.0),
    ],
    ids=["429 with a pause", "429", "500", "502", "503", "half a body", "no answer", "slow", "drip"],
)
def test_passing_faults_are_tried_again(texts, fault):
    samples = texts(6)
    with standing_in(fault, fault) as server:
        scorer = remote(server.url, batch=3, concurrency=1)
        scores = scorer(samples)
        scorer.close()
    assert scores.total.tolist() == [1, 2, 3, 4, 5, 6]
    assert scores.counts["far/retries"] == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(500, b"out of memory"), r"/score: status 500: out of memory \(given up after 4 tries\)"),
        (status(429), "status 429: no .*4 tries"),
        (stand_in.half, "the answer broke off .*4 tries"),
        (stand_in.drip(20), r"no answer in 0\.5 s .*4 tries"),
    ],
)
def test_lasting_faults_end_in_seconds(texts, fault, message):
    with standing_in(otherwise=fault) as server:
        scorer = remote(server.url)
        start = time.monotonic()
        with pytest.raises(RewardError, match=message) as caught:
            scorer(texts(3))
        assert time.monotonic() - start < 5
        assert len(server.requests) == 4  # and no sample was sent again by itself
        assert "sample 0 of the prompt in p.jsonl:1" in str(caught.value)
        scorer.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400, b'{"error": "too long"}'), r'status 400: \{"error": "too long"\}'),
        (status(302), "status 302"),
        (stand_in.says(b'{"rewards": [1, 2'), "answered what is no JSON"),
        (stand_in.says(b"\xff\xfe\x00"), "answered what is no JSON"),
        (stand_in.says(b"[1, 2, 3]"), "no list 'rewards' for 3 samples"),
        (stand_in.says(b'{"reward": [1, 2, 3]}'), "no list 'rewards' for 3 samples"),
        (stand_in.says(b'{"rewards": [1, 2]}'), "2 values for 3 samples"),
        (stand_in.says(b'{"rewards": [1, "2", 3]}'), "has 2 where numbers were expected"),
        (stand_in.says(b'{"rewards": [[1, 2], [1, 2], [1, 2]]}'), "2 numbers a sample, and attribute_weights is empty"),
    ],
)
def test_answers_that_trying_again_does_not_mend(texts, fault, message):
    with standing_in(otherwise=fault) as server:
        scorer = remote(server.url)
        with pytest.raises(RewardError, match=message):
            scorer(texts(3))
        assert len(server.requests) == 1
        scorer.close()


@pytest.mark.parametrize(("code", "message"), [(401, "see token_env"), (403, "see token_env"), (404, "see path")])
def test_a_wrong_token_or_path_is_the_configurations_fault(texts, code, message):
    with standing_in(otherwise=status(code)) as server:
        scorer = remote(server.url, on_error="count")
        with pytest.raises(InputError, match=message):
            scorer(texts(2))
        assert len(server.requests) == 1
        scorer.close()


def test_a_connection_that_was_closed_meanwhile_is_no_fault(texts):
    """Servers close idle connections at will; the request goes out again on a new one, and nothing is counted."""

    def closing(handler, posted):
        lengths(handler, posted)
        handler.hang_up()

    with standing_in(otherwise=closing) as server:
        scorer = remote(server.url, batch=1, concurrency=1)
        samples = texts(4)
        for _ in range(3):
            scores = scorer(samples)
            assert scores.total.tolist() == [1, 2, 3, 4]
            assert scores.counts["far/retries"] == 0
        scorer.close()
        assert server.scored == {s.completion: 3 for s in samples}


def test_a_wrong_port(texts):
    scorer = remote(f"http://127.0.0.1:{stand_in.free_port()}")
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"no connection \(Connection refused\) \(given up after 4 tries\)"):
        scorer(texts(2))
    assert time.monotonic() - start < 3
    scorer.close()
    with stand_in.garbage() as url:
        scorer = remote(url)
        with pytest.raises(RewardError, match="no HTTP comes from there; is the port right"):
            scorer(texts(2))
        scorer.close()


def test_failures_are_counted_if_so_configured(texts):
    with standing_in(status(400), otherwise=lengths) as server:
        scorer = remote(server.url, on_error="count", batch=2, concurrency=1)
        scores = scorer(texts(4))
        scorer.close()
        assert len(server.requests) == 2
    np.testing.assert_array_equal(scores.total, [np.nan, np.nan, 3, 4])
    assert scores.errors == {"far": 2}


def test_a_dead_server_is_dropped_and_tried_later(texts):
    """Field lesson: one of several servers is killed in the middle of a run and started again."""
    with standing_in(otherwise=stand_in.sleep(0.02)) as good, standing_in(otherwise=stand_in.sleep(0.02)) as bad:
        scorer = remote(good.url, bad.url, batch=1, concurrency=4)
        samples = texts(16)
        want = [len(s.completion) for s in samples]
        assert scorer(samples).total.tolist() == want
        asked = len(bad.requests)
        assert asked >= 4
        bad.otherwise = status(500)
        scores = scorer(samples)
        assert scores.total.tolist() == want
        assert scores.counts["far/servers_dropped"] == 1
        assert 2 <= len(bad.requests) - asked <= 5
        asked = len(bad.requests)
        scorer(samples)
        assert len(bad.requests) - asked <= 1
        bad.otherwise = stand_in.sleep(0.02)
        time.sleep(0.7)
        asked = len(bad.requests)
        scorer(samples)
        scorer(samples)
        assert len(bad.requests) - asked >= 4
        scorer.close()


def test_a_server_that_is_killed_and_comes_back(texts):
    """All in flight is tried again at the other one; nothing is lost, nothing is scored twice by the same answer."""
    samples = texts(40)
    with standing_in(otherwise=stand_in.sleep(0.05)) as good:
        server = stand_in.StandIn([], stand_in.sleep(0.05))
        scorer = remote(good.url, server.url, batch=1, concurrency=6)
        timer = threading.Timer(0.1, server.stop)
        timer.start()
        assert scorer(samples).total.tolist() == [len(s.completion) for s in samples]
        timer.join()
        scorer.close()


def test_it_streams(texts):
    """Batches go out as their samples end, while others are still sampled."""
    samples = texts(6)
    with standing_in() as server:
        scorer = remote(server.url, chunk=2, batch=2, workers=2)
        scoring = scorer.begin(6)
        for place in (0, 1, 4, 5):
            scoring.add(place, samples[place])
        ends = time.monotonic() + 5
        while len(server.scored) < 4 and time.monotonic() < ends:
            time.sleep(0.01)
        assert len(server.scored) == 4
        for place in (2, 3):
            scoring.add(place, samples[place])
        assert scoring.result().total.tolist() == [1, 2, 3, 4, 5, 6]
        scorer.close()


def test_the_deadline_is_that_of_all_batches(texts):
    with standing_in(otherwise=stand_in.sleep(30)) as server:
        scorer = remote(server.url, batch=1, concurrency=1, patience={**QUICK, "deadline_s": 1.0}, on_error="count")
        start = time.monotonic()
        scores = scorer(texts(8))
        assert time.monotonic() - start < 2
        assert scores.errors == {"far": 8}
        scorer.close()


def test_the_token(texts, monkeypatch):
    with standing_in() as server:
        with pytest.raises(InputError, match=r"rewards\.far\.kwargs: token_env = 'NO_SUCH_TOKEN': .* is not set"):
            remote(server.url, token_env="NO_SUCH_TOKEN")
        monkeypatch.setenv("SCORE_TOKEN", "secret")
        scorer = remote(server.url, token_env="SCORE_TOKEN")
        scorer(texts(1))
        scorer.close()
        assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"urls": ()}, "urls is empty"),
        ({"urls": ("127.0.0.1:8000",)}, "expected a server as http://HOST:PORT"),
        ({"urls": ("http://127.0.0.1:99999",)}, "Port out of range"),
        ({"urls": ("http://a",), "batch": 0}, "batch = 0: must be at least 1"),
        ({"urls": ("http://a",), "batch": "8"}, r"rewards\.far\.kwargs\.batch = '8': expected int"),
        ({"urls": ("http://a",), "bacth": 8}, r"kwargs\.bacth: unknown key \(did you mean 'batch'\?\)"),
        ({"urls": ("http://a",), "format": "csv"}, "expected one of"),
        ({"urls": ("http://a",), "patience": {"tries": 0}}, r"kwargs\.patience: tries = 0: must be above 0"),
        ({"urls": ("http://a",), "path": "score"}, "must begin with /"),
        ({"urls": ("http://a",), "format": "tokens", "columns": ("gold",)}, "only, and it is 'tokens'"),
    ],
)
def test_settings_are_typed_and_checked_first(kwargs, message):
    with pytest.raises(InputError, match=message):
        build({"far": RewardSpec("yatt_jax.rewards.remote:Remote", kwargs=kwargs)})
