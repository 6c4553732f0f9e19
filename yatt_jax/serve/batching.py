"""Puts together what several requests ask for, so that the devices are called with many rows at a time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Busy(Exception):
    """More is waiting than may."""


@dataclasses.dataclass
class _Waiting(Generic[Item, Result]):
    item: Item
    future: asyncio.Future[Result]
    since: float


class Batcher(Generic[Item, Result]):
    """Calls a function with up to so many items, one call at a time, in a thread.

    A batch starts when it is full, or when its first item has waited for the delay; while a call runs, the next batch
    gathers. An item whose request was given up is left out.

    Args:
      run: from items to results, in order.
      most: items of a call.
      delay_s: see above.
      waiting: items that may wait.
      observe: told of each call its number of items and its seconds.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        most: int,
        delay_s: float,
        waiting: int,
        observe: Callable[[int, float], None],
    ) -> None:
        self._run, self._most, self._delay_s, self._limit = run, most, delay_s, waiting
        self._observe = observe
        self._queue: collections.deque[_Waiting[Item, Result]] = collections.deque()
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "devices")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Items that wait."""
        return len(self._queue)

    def start(self) -> None:
        """Begins to work, on the running event loop."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Ends after the call under way; whoever still waits is told that the work was cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._queue:
            self._queue.popleft().future.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """The results of items, which may be spread over several calls.

        Raises:
          Busy: too many wait already.
          Exception: what the function raised.
        """
        if len(self._queue) + len(items) > self._limit:
            raise Busy
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [_Waiting[Item, Result](item, loop.create_future(), now) for item in items]
        self._queue.extend(waiting)
        self._came.set()
        return list(await asyncio.gather(*(one.future for one in waiting)))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            start = time.monotonic()
            try:
                results = await loop.run_in_executor(self._thread, self._run, [one.item for one in batch])
                for one, result in zip(batch, results, strict=True):
                    if not one.future.done():
                        one.future.set_result(result)
            except asyncio.CancelledError:
                for one in batch:
                    one.future.cancel()
                raise
            except Exception as error:
                for one in batch:
                    if not one.future.done():
                        one.future.set_exception(error)
            self._observe(len(batch), time.monotonic() - start)

    async def _gather(self) -> list[_Waiting[Item, Result]]:
        """The next batch, as soon as it is to start."""
        while True:
            while self._queue and self._queue[0].future.done():
                self._queue.popleft()
            left = self._queue[0].since + self._delay_s - time.monotonic() if self._queue else None
            if len(self._queue) >= self._most or (left is not None and left <= 0):
                break
            self._came.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), left)
        batch: list[_Waiting[Item, Result]] = []
        while self._queue and len(batch) < self._most:
            one = self._queue.popleft()
            if not one.future.done():
                batch.append(one)
        return batch
