"""Parts of the server by themselves: batches, texts, configuration."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from yatt_jax.data.documents import Encoder
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.records import Record
from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.serve.batching import Batcher, Busy
from yatt_jax.serve.config import ServeConfig
from yatt_jax.serve.scoring import _steps
from yatt_jax.serve.texts import RequestError, Texts
from yatt_jax.typed import from_dict
from yatt_jax.types import TextRows

TEMPLATE = (
    "{% for m in messages %}{{ '1' if m['role'] == 'user' else '2' }}{{ m['content'] }}{{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}2{% endif %}"
)


class Calls:
    """A model that doubles, slowly; notes the sizes of its calls."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.sizes, self.threads = seconds, [], set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.sizes.append(len(items))
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        if -1 in items:
            raise ZeroDivisionError("bad item")
        return [2 * item for item in items]


def batched(model: Calls, work, **settings):
    """Runs ``work(batcher)``."""

    async def run():
        given = {"most": 4, "delay_s": 0.05, "waiting": 100} | settings
        batcher = Batcher[int, int](model, observe=lambda rows, seconds: None, **given)
        batcher.start()
        try:
            return await asyncio.wait_for(work(batcher), 20)
        finally:
            await batcher.stop()

    return asyncio.run(run())


def test_requests_share_calls():
    model = Calls()

    async def work(batcher):
        return await asyncio.gather(*(batcher.submit([i, 10 * i]) for i in range(1, 6)))

    assert batched(model, work) == [[2 * i, 20 * i] for i in range(1, 6)]
    assert model.sizes == [4, 4, 2]
    assert len(model.threads) == 1


def test_a_full_batch_does_not_wait_and_another_waits_for_the_delay():
    async def work(batcher):
        start = time.monotonic()
        await batcher.submit([1, 2, 3, 4])
        full = time.monotonic() - start
        await batcher.submit([1])
        return full, time.monotonic() - start - full

    full, single = batched(Calls(), work, delay_s=0.5)
    assert full < 0.4
    assert single >= 0.5


def test_a_failure_is_that_of_its_batch():
    async def work(batcher):
        first = asyncio.gather(*(batcher.submit([i]) for i in (1, -1, 2, 3)), return_exceptions=True)
        return await first, await batcher.submit([5])

    failed, fine = batched(Calls(), work)
    assert [type(one) for one in failed] == [ZeroDivisionError] * 4
    assert fine == [10]


def test_too_much_is_refused_and_what_was_given_up_is_left_out():
    model = Calls(0.2)

    async def work(batcher):
        first = asyncio.create_task(batcher.submit([1, 2, 3, 4]))
        await asyncio.sleep(0.1)
        given_up = asyncio.create_task(batcher.submit([5, 6, 7]))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await batcher.submit([8, 9])
        given_up.cancel()
        return await first, await batcher.submit([8, 9, 10])

    assert batched(model, work, waiting=4) == ([2, 4, 6, 8], [16, 18, 20])
    assert model.sizes == [4, 3]


@pytest.mark.parametrize("template", ["", TEMPLATE], ids=["plain", "template"])
def test_texts_are_tokenized_as_in_training(template):
    tokenizer = load_tokenizer("characters:0123456789 ")
    if template:
        tokenizer.chat_template = template
    pairs = [("12", "345"), ("7", "8"), ("90", "1")]
    rows = Encoder(OfflineConfig(), tokenizer, TextRows).read(
        [(i, Record({"prompt": a, "completion": b}, "x")) for i, (a, b) in enumerate(pairs)]
    )
    trained = [outcome.row.documents[0].tokens.tolist() for outcome in rows if outcome.row is not None]
    samples = [
        {"completion": b} | ({"messages": [{"role": "user", "content": a}]} if template else {"prompt": a})
        for a, b in pairs
    ]
    served, exceeded = Texts(tokenizer, vocab=12, limit=20, cut=False).rows({"samples": samples})
    assert [row.tolist() for row in served] == trained
    assert exceeded == [False] * 3


def test_long_texts_are_cut_or_refused():
    tokenizer = load_tokenizer("characters:0123456789 ")
    request = {"tokens": [[1, 2, 3, 4], [5, 6, 0, 0]], "sequence_lengths": [[4], [2]]}
    rows, exceeded = Texts(tokenizer, vocab=12, limit=3, cut=True).rows(request)
    assert [row.tolist() for row in rows] == [[2, 3, 4], [5, 6]]
    assert exceeded == [True, False]
    with pytest.raises(RequestError, match="text 0 has 4 tokens, and the longest allowed has 3"):
        Texts(tokenizer, vocab=12, limit=3, cut=False).rows(request)


def test_shapes_that_are_compiled():
    assert _steps(32, 1024, 2) == [32, 64, 128, 256, 512, 1024]
    assert _steps(32, 1000, 2) == [32, 64, 128, 256, 512, 1000]
    assert _steps(2, 64, 4) == [2, 8, 32, 64]
    assert _steps(8, 8, 4) == [8]
    assert np.all(np.diff(_steps(1, 48, 4)) > 0)


def test_the_config_and_what_it_refuses():
    given = importlib.import_module("configs.serve.model").get_config()
    assert given.is_locked
    values = given.to_dict()

    def faults(**changes) -> str:
        found: list[str] = []
        from_dict(ServeConfig, values | {"path": "a"} | changes, "config", found)
        return "\n".join(found)

    assert faults() == ""
    assert "path is empty" in faults(path="")
    for host in ("0.0.0.0", "10.1.2.3", "::", "example.org"):
        assert "can be reached from other machines: set token_env" in faults(host=host)
        assert faults(host=host, token_env="TOKEN") == ""
    for host in ("127.0.0.2", "::1", "localhost"):
        assert faults(host=host) == ""
    assert "config.batch: rows = 0" in faults(batch={"rows": 0})
    assert "config.limits: request_s = 0.0" in faults(limits={"request_s": 0})
