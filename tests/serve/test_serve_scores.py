"""A reward model and a critic over HTTP, against transformers, and with the reward's own client."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.serve.conftest import ROOT
from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.rewards import RewardSpec, build
from yatt_jax.types import Prompt, Sample

TOKENS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], list(range(1, 11)) * 6]


@pytest.fixture(scope="module")
def reward(serve):
    with serve("reward") as server:
        yield server


def in_torch(folder, kind: str, rows: list[list[int]]) -> list[np.ndarray]:
    """A folder's head outputs at every token of each row, by transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForTokenClassification
    model = auto.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = [model.model(torch.tensor([row])).last_hidden_state for row in rows]
        return [model.score(of)[0].numpy() for of in hidden]


def padded(rows: list[list[int]]) -> dict[str, list]:
    longest = max(map(len, rows))
    return {"tokens": [row + [0] * (longest - len(row)) for row in rows], "sequence_lengths": [len(r) for r in rows]}


def test_rewards_are_those_of_transformers(reward, serve):
    status, found = reward.ask("/score", padded(TOKENS))
    want = [float(of[-1, 0]) for of in in_torch(serve.folder / "reward", "reward", TOKENS)]
    assert status == 200
    np.testing.assert_allclose(found["rewards"], want, rtol=1e-4, atol=1e-5)
    assert found["exceeded"] == [False] * 4


@pytest.mark.slow
def test_values_are_those_of_transformers(serve):
    with serve("critic") as server:
        status, found = server.ask("/values", padded(TOKENS))
    assert status == 200
    for values, want in zip(found["values"], in_torch(serve.folder / "critic", "value", TOKENS), strict=True):
        np.testing.assert_allclose(values, want[:, 0], rtol=1e-4, atol=1e-5)


def test_all_forms_say_the_same(reward):
    tokenizer = load_tokenizer("characters:0123456789 ")
    prompts, completions = ["12", "3", "45 "], ["345", "", "6"]
    rows = [[*tokenizer(a + b)["input_ids"], tokenizer.eos_token_id] for a, b in zip(prompts, completions, strict=True)]
    rewards = reward.ask("/score", padded(rows))[1]["rewards"]
    samples = [{"prompt": a, "completion": b} for a, b in zip(prompts, completions, strict=True)]
    assert reward.ask("/score", {"samples": samples})[1]["rewards"] == rewards
    sentences = [a + b for a, b in zip(prompts, completions, strict=True)]
    assert reward.ask("/score", {"sentences": sentences, "add_EOS": True})[1]["rewards"] == rewards
    assert reward.ask("/score", {"sentences": sentences})[1]["rewards"] != rewards


def test_the_client_and_the_server(reward):
    def sample(i: int) -> Sample:
        return Sample(Prompt([], f"{i}", [i % 10 + 1], {}, "p", i), str(i) * 3, [i % 10 + 1] * 3, "stop", i, i)

    samples = [sample(i) for i in range(30)]
    found = []
    for form in ("samples", "tokens"):
        kwargs = {"urls": (reward.url,), "format": form, "batch": 7}
        scorer = build({"far": RewardSpec("yatt_jax.rewards.remote:Remote", kwargs=kwargs)})
        scores = scorer(samples)
        scorer.close()
        assert scores.invalid == scores.errors == {"far": 0}
        found.append(scores.total)
    alone = [
        reward.ask("/score", {"samples": [{"prompt": s.prompt.text, "completion": s.completion}]}) for s in samples
    ]
    np.testing.assert_allclose(found[0], [one[1]["rewards"][0] for one in alone], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("posted", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        (b"[1]", 400, "expected a JSON object, found list"),
        (b"[" * 100_000, 400, "the body is no JSON"),
        ({}, 400, 'give one of "samples", "sentences" and "tokens"'),
        ({"sentences": ["1"], "tokens": [[1]]}, 400, "give one of"),
        ({"sentences": "123"}, 400, '"sentences": expected a list, found str'),
        ({"sentences": [1]}, 400, r"sentences[0]: expected a string, found int"),
        ({"sentences": ["1x"]}, 400, "cannot be tokenized"),
        ({"sentences": ["1" * 65]}, 400, "text 0 has 65 tokens, and the longest allowed has 64"),
        ({"sentences": ["1"] * 2000}, 400, "2000 texts in a request, and 1024 are allowed"),
        ({"sentences": [""]}, 400, "text 0 has no tokens"),
        ({"samples": [{"prompt": "1"}]}, 400, 'samples[0]: expected an object with a string under "completion"'),
        ({"samples": [{"messages": [{"role": "user", "content": "1"}], "completion": "2"}]}, 400, "chat template"),
        ({"tokens": [[1, 99]], "sequence_lengths": [2]}, 400, "tokens[0]: the vocabulary has 12 entries"),
        ({"tokens": [[1, 2]], "sequence_lengths": [3]}, 400, "sequence_lengths[0] = 3: expected a number up to 2"),
        ({"tokens": [[1, 2]], "sequence_lengths": []}, 400, "1 tokens and 0 sequence_lengths"),
        ({"tokens": [[1, True]], "sequence_lengths": [2]}, 400, "tokens[0]: expected a list of whole numbers"),
        (b" " * 17_000_000, 413, "a body of more than 16 MB"),
    ],
    ids=lambda value: None if isinstance(value, str | int) else "posted",
)
def test_bad_requests(reward, posted, status, message):
    try:
        found = reward.ask("/score", posted)
    except (ConnectionError, OSError):  # it hangs up on who goes on sending
        assert status == 413
        return
    assert found[0] == status
    assert message in found[1]["error"]


def test_other_paths_health_and_metrics(reward):
    assert reward.ask("/generate", {})[0] == 404
    assert reward.get("/health") == '{"status":"ok","path":"/score"}'
    reward.ask("/score", padded(TOKENS))
    metrics = reward.get("/metrics")
    assert 'yatt_requests_total{path="/score",status="200"}' in metrics
    assert "yatt_batch_rows_bucket" in metrics
    assert "yatt_waiting_texts 0.0" in metrics


@pytest.mark.slow
def test_a_body_that_never_comes(serve):
    with serve("reward", "--config.limits.body_s=0.5") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as client:
            client.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert server.ask("/score", padded(TOKENS))[0] == 200


@pytest.mark.slow
def test_the_token(serve):
    env = {"SERVE_TOKEN": "secret"}
    with serve("reward", "--config.token_env=SERVE_TOKEN", "--config.limits.overlong=cut", env=env) as server:
        posted = {"sentences": ["1" * 70, "2"]}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert server.ask("/score", posted, **headers)[0] == 401
        status, found = server.ask("/score", posted, Authorization="Bearer secret")
        assert (status, found["exceeded"]) == (200, [True, False])
        cut = server.ask("/score", {"sentences": ["1" * 64]}, Authorization="Bearer secret")[1]
        np.testing.assert_allclose(found["rewards"][0], cut["rewards"][0], rtol=1e-5)


@pytest.mark.slow
def test_requests_are_put_together_and_all_answered_when_it_stops(serve):
    """Drain: what was asked before the signal is answered, and the exit status is 0."""
    with serve("reward", "--config.batch.delay_ms=300") as server:
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(server.ask, "/score", {"sentences": [str(i)] * 2}) for i in range(8)]
            time.sleep(0.1)
            done = threads.submit(server.stop)
            answers = [one.result() for one in asked]
            assert done.result() == 0
        assert [status for status, _ in answers] == [200] * 8
        with pytest.raises(OSError):  # noqa: PT011
            server.get("/health")


@pytest.mark.slow
def test_too_much_waiting_is_refused(serve):
    flags = ("--config.batch.waiting=8", "--config.batch.delay_ms=500")
    with serve("reward", *flags) as server, ThreadPoolExecutor(2) as threads:
        first = threads.submit(server.ask, "/score", {"sentences": ["1"] * 7})
        time.sleep(0.2)
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("POST", "/score", b'{"sentences": ["1", "2"]}')
        refused = connection.getresponse()
        assert (refused.status, refused.getheader("Retry-After")) == (429, "1")
        assert first.result()[0] == 200


@pytest.mark.slow
def test_clients_that_go_away_cost_nothing(serve):
    with serve("reward", "--config.batch.delay_ms=200") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(5):
            client = socket.create_connection((host, int(port)), 10)
            client.sendall(b'POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{"sentences": ["1"]}')
            client.close()
        assert server.ask("/score", padded(TOKENS))[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "config: path is empty"),
        (("--role=actor",), "--role=actor: expected one of reward, critic, judge"),
        (("--config.path=/nowhere",), "/nowhere: no such folder"),
        (("--config.path=a", "--config.host=0.0.0.0"), "can be reached from other machines: set token_env"),
        (("--config.path=a", "--config.token_env=NO_TOKEN"), "the environment variable is not set"),
        (("--config.path=a", "--config.batch.row=3"), 'Did you mean "rows"'),
        (("--config.path=a", "--config.batch.rows=0"), "config.batch: rows = 0: must be at least 1"),
    ],
)
def test_commands_that_cannot_be_followed(flags, message):
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "yatt_jax.serve", "--config=configs/serve/model.py", "--port=0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_model_of_another_kind_and_a_port_in_use(serve):
    with serve("judge") as server:
        port = server.url.rpartition(":")[2]
        path = f"--config.path={serve.folder / 'judge'}"
        for flags, message in (
            ((path, "--port=0"), "a language model, whose reward head would be fresh"),
            ((path, f"--port={port}"), f"127.0.0.1, port {port}: cannot be listened at: Address already in use"),
        ):
            command = [sys.executable, "-m", "yatt_jax.serve", "--config=configs/serve/model.py", *flags]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
            assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_64_clients_for_a_minute(serve, tmp_path):
    """No error, and the slowest of a hundred requests takes less than twice the model's batch."""
    from tests.serve import models

    models.write(tmp_path / "larger", "reward", layers=6, hidden=256)
    flags = ("--config.batch.rows=64", "--config.batch.delay_ms=100")  # a fifth of what a batch takes here
    with serve("reward", *flags, path=str(tmp_path / "larger")) as server:
        texts = {"sentences": ["1234567890" * 6]}
        ends, seconds, errors = time.monotonic() + 60, [], []

        def client() -> None:
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
            body = str(texts).replace("'", '"').encode()
            while time.monotonic() < ends:
                start = time.monotonic()
                connection.request("POST", "/score", body)
                answer = connection.getresponse()
                answer.read()
                (seconds if answer.status == 200 else errors).append(time.monotonic() - start)

        # A batch of all of them, asked for in one request.
        full = [_timed(server, {"sentences": texts["sentences"] * 64}) for _ in range(5)]
        threads = [threading.Thread(target=client) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        p99 = float(np.percentile(seconds, 99))
        print(f"{len(seconds)} requests, p50 {np.median(seconds):.3f} s, p99 {p99:.3f} s, a batch {min(full):.3f} s")
        assert errors == []
        assert p99 < 2 * float(np.median(full))


def _timed(server, posted) -> float:
    start = time.monotonic()
    assert server.ask("/score", posted)[0] == 200
    return time.monotonic() - start
