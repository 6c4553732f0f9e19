"""The world that ``tools.simulate_placement`` plays in: devices, models, engines that sample and judge.

Events are those of the real engine: rows come, wait for a slot, are taken in (their prompt is computed), decode
together with all others in chunks of steps, and leave at the end of a chunk. Hosts are simulated one by one, row by
row. What is assumed:

- A decode step reads the weights once and the keys and values of the rows in slots, or multiplies, whichever takes
  longer, on each device, and begins with a fixed overhead. Rows are spread evenly over a share's devices, each of which
  holds the whole model.
- Prompts are computed at the devices' arithmetic rate, one after the other on each device; decoding stands still
  meanwhile. They are taken in when a sixteenth of the slots is free. Nothing is shared between rows that answer the
  same prompt.
- A judge reads a template, the prompt and the end of the response, and writes a verdict. A score also waits for the
  functions and servers that need no device.
- Where groups without a signal are replaced, some rows are sampled again: at once when they are judged where judge and
  actor run at the same time, and in a further turn of both where they take turns.
- A phase begins with the actor's weights coming from the training layout, over the links between devices. The judge's
  come from host memory, once where it runs at the same time, and where they take turns both at every further turn, over
  links that all devices of a host share.
- Training takes all devices, at the arithmetic rate, for an update and two passes that score, whatever the placement.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from yatt_jax.controller.forecast import Load
from yatt_jax.controller.placement import Phase, Placement
from yatt_jax.rollout.pace import Chunk, fit_steps

SAMPLER, JUDGE = "sample", "judge"
CHUNK = 16  # decode steps between two looks of the host, as in the engine


@dataclasses.dataclass(frozen=True)
class Network:
    """A model of half precision.

    Attributes:
      parameters: number of them.
      cache_bytes: keys and values of a token.
    """

    parameters: float
    cache_bytes: float

    @property
    def weights(self) -> float:
        """Bytes."""
        return 2 * self.parameters

    def prefill(self, tokens: float, flops: float) -> float:
        """Seconds in which a device computes so many tokens of prompts."""
        return 2 * self.parameters * tokens / flops


@dataclasses.dataclass(frozen=True)
class Machine:
    """What devices and models are like.

    Attributes:
      devices: of a host.
      bandwidth: bytes a second of device memory, in practice.
      flops: a second, in practice.
      memory: bytes of a device for the weights and cache of one model.
      host_link: bytes a second from host memory to a device while all of the host load.
      device_link: bytes a second between devices.
      overhead: seconds of a decode step beside reading and multiplying.
      actor: the model that samples.
      judge: the model that judges.
      longest: most tokens of a response or a verdict.
      prompt: tokens of a prompt.
      template: tokens of the judge's template.
      read: most tokens of a response that the judge reads: the answer at its end, without the thoughts before.
      rows: rows of a step for each device of the job.
      wake: seconds that an engine needs to begin, beside loading weights: its cache is made, its programs are bound.
      compile: seconds that the programs of a split take to compile.
    """

    devices: int = 8
    bandwidth: float = 2.4e12
    flops: float = 4e14
    memory: float = 72e9
    host_link: float = 12e9
    device_link: float = 1e11
    overhead: float = 1e-3
    actor: Network = Network(8e9, 131072)
    judge: Network = Network(8e9, 131072)
    longest: int = 8192
    prompt: int = 256
    template: int = 256
    read: int = 1024
    rows: int = 64
    wake: float = 0.5
    compile: float = 90.0

    def slots(self, model: Network) -> int:
        """Rows whose keys and values fit beside the weights."""
        asked = self.prompt + (self.template + self.read if model is self.judge else 0)
        longest = asked + self.longest
        return max(1, int((self.memory - model.weights) / (longest * model.cache_bytes)))

    def step(self, model: Network, rows: float, context: float) -> float:
        """Seconds of a decode step of a device with ``rows`` rows that hold ``context`` tokens together."""
        read = (model.weights + context * model.cache_bytes) / self.bandwidth
        return self.overhead + max(read, 2 * model.parameters * rows / self.flops)

    def load(self, model: Network) -> float:
        """Seconds until a model is ready on devices that did something else before."""
        return self.wake + model.weights / self.host_link

    @property
    def begin(self) -> float:
        """Seconds until the actor is ready at the beginning of a phase."""
        return self.wake + self.actor.weights / self.device_link

    @property
    def move(self) -> float:
        """Seconds that a move costs: weights go to other devices of the host, caches are made anew."""
        return self.wake + max(self.actor.weights, self.judge.weights) / self.device_link

    def training(self, tokens: float, devices: float) -> float:
        """Seconds of an update and the passes of old policy and reference."""
        return (6 + 2 + 2) * self.actor.parameters * tokens / (self.flops * devices)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a step on one host.

    Attributes:
      prompts: tokens that the sampler takes in.
      lengths: tokens of each response.
      verdicts: tokens of each verdict.
      latency: seconds of functions and servers for each row.
      again: the row that is sampled in the place of each, where its group has no signal; -1: none.
      first: number of rows that are sampled at the beginning; the others are replacements.
      pace: how many times as long as usual everything takes on this host.
    """

    prompts: np.ndarray
    lengths: np.ndarray
    verdicts: np.ndarray
    latency: np.ndarray
    again: np.ndarray
    first: int
    pace: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens that are trained on."""
        used = self.again < 0
        return int((self.prompts + self.lengths)[used].sum())


class Engine:
    """Runs rows through the slots of some devices.

    Args:
      machine: the world.
      model: that runs.
      devices: of the engine.
      prompts: tokens that are computed when a row is taken in.
      lengths: tokens that each row writes.
      pace: see ``Batch``.
      now: seconds at which it is ready.

    Attributes:
      now: its clock.
      busy: seconds with rows.
      chunks: of decode steps.
      served: rows that have left.
    """

    def __init__(
        self,
        machine: Machine,
        model: Network,
        devices: int,
        prompts: np.ndarray,
        lengths: np.ndarray,
        pace: float,
        now: float,
    ):
        self._machine, self._model, self._devices, self._pace = machine, model, devices, pace
        self._prompts, self._lengths = prompts.tolist(), lengths.tolist()
        self._room = machine.slots(model) * devices
        self._coming: list[tuple[float, int]] = []
        self._running: list[tuple[int, int]] = []  # step at which a row ends, and its number
        self._walked, self._context, self._queued = 0, 0.0, 0.0
        self._taking_in = 0.0  # device-seconds that are no padding
        self.now, self.busy, self.served = now, 0.0, 0
        self.chunks: list[Chunk] = []

    def add(self, when: float, row: int) -> None:
        """A row comes."""
        heapq.heappush(self._coming, (when, row))

    @property
    def next(self) -> float:
        """When it begins its next chunk; infinite where it has nothing to do."""
        if self._running:
            return self.now
        return max(self.now, self._coming[0][0]) if self._coming else math.inf

    def chunk(self) -> list[int]:
        """Takes in what has come, and decodes a chunk; returns the rows that have ended, at ``now``."""
        machine, running = self._machine, self._running
        begin = self.now = self.next
        fresh, tokens = 0, 0
        patient = bool(running) and self._room - len(running) < self._room // 16
        while not patient and self._coming and self._coming[0][0] <= begin and len(running) < self._room:
            _, row = heapq.heappop(self._coming)
            heapq.heappush(running, (self._walked + self._lengths[row], row))
            fresh, tokens = fresh + 1, tokens + self._prompts[row]
        if fresh:  # each device computes whole prompts
            each = self._model.prefill(tokens / fresh, machine.flops)
            seconds = self._pace * each * math.ceil(fresh / self._devices)
            self._context += tokens
            self._taking_in += self._pace * each * fresh
            self.now += seconds
        steps = CHUNK if len(running) > 8 else min(CHUNK, max(running)[0] - self._walked)
        rows = len(running)
        context = (self._context + rows * steps / 2) / self._devices
        seconds = steps * self._pace * machine.step(self._model, rows / self._devices, context)
        self.chunks.append(Chunk(rows / self._devices, steps, seconds))
        self.now += seconds
        self.busy += self.now - begin
        self._queued += len(self._coming) * (self.now - begin)
        self._walked += steps
        self._context += rows * steps
        ended = []
        while running and running[0][0] <= self._walked:
            end, row = heapq.heappop(running)
            self._context -= self._prompts[row] + self._lengths[row] + (self._walked - end)
            ended.append(row)
        self.served += len(ended)
        return ended

    def load(self, seconds: float, lengths: Sequence[int], replaced: int) -> Load:
        """What its controller would have measured in a phase of so many seconds."""
        step, row = fit_steps(self.chunks)
        return Load(
            busy=self.busy,
            waiting=max(0.0, seconds - self.busy),
            queue=self._queued / self.busy,
            rows=self.served,
            slots=self._machine.slots(self._model),
            lengths=tuple(lengths),
            step=step,
            row=row,
            admit=self._taking_in / self.served,
            replaced=replaced,
        )


def split_phase(machine: Machine, batch: Batch, placement: Placement) -> Phase:
    """A host's rollout phase where sampling and judging run at the same time, as its controller would measure it."""
    sampler, judge = _engines(machine, batch, placement[SAMPLER], placement[JUDGE])
    for row in range(batch.first):
        sampler.add(sampler.now, row)
    last = wrote = outside = 0.0
    while (when := min(sampler.next, judge.next)) < math.inf:
        if sampler.next == when:
            for row in sampler.chunk():
                judge.add(sampler.now, row)
                wrote = sampler.now
                outside = max(outside, wrote + batch.latency[row])
        else:
            for row in judge.chunk():
                last = max(last, judge.now)
                if batch.again[row] >= 0:
                    sampler.add(judge.now, int(batch.again[row]))
    seconds = max(last, outside)
    lengths, verdicts = batch.lengths.tolist(), batch.verdicts.tolist()
    more = len(lengths) - batch.first
    loads = {SAMPLER: sampler.load(seconds, lengths, more), JUDGE: judge.load(seconds, verdicts, more)}
    return Phase(placement, seconds, outside - wrote, loads)


def turns_phase(machine: Machine, batch: Batch) -> float:
    """Seconds of a host's rollout phase where actor and judge take turns on all devices."""
    sampler, judge = _engines(machine, batch, machine.devices, machine.devices)
    rows, now, outside = list(range(batch.first)), 0.0, 0.0
    while rows:
        for engine, model in ((sampler, machine.actor), (judge, machine.judge)):
            now += machine.load(model) if now else machine.begin
            engine.now = now
            for row in rows:
                engine.add(now, row)
            for row in _run(engine):
                if engine is sampler:
                    outside = max(outside, engine.now + batch.latency[row])
            now = engine.now
        rows = [int(batch.again[row]) for row in rows if batch.again[row] >= 0]
    return max(now, outside)


def _run(engine: Engine) -> Iterator[int]:
    while engine.next < math.inf:
        yield from engine.chunk()


def _engines(machine: Machine, batch: Batch, sampling: int, judging: int) -> tuple[Engine, Engine]:
    asked = machine.template + batch.prompts + np.minimum(batch.lengths, machine.read)
    return (
        Engine(machine, machine.actor, sampling, batch.prompts, batch.lengths, batch.pace, machine.begin),
        Engine(machine, machine.judge, judging, asked, batch.verdicts, batch.pace, machine.load(machine.judge)),
    )
