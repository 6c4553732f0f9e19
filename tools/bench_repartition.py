"""What moving a model between its two layouts costs: ``python -m tools.bench_repartition [--topology=v5e:2x4]``.

With ``--topology`` every distinct move is compiled for a TPU slice that need not be there, and the compiler's memory
analysis is printed: bytes a device for input, output and temporaries. Without, the model's arrays are made on the
devices of this machine (on a CPU, eight virtual ones), moved there and back, and parked in host memory; time, bytes and
rates are printed. Sizes are those of Llama 3.1 8B, Llama 3.2 1B, or small enough for any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from yatt_jax.errors import InputError
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.names import flatten
from yatt_jax.parallel.moves import compile_move
from yatt_jax.parallel.park import can_park, fetch, park
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.parallel.repartition import Moved, bytes_per_device, measured, release
from yatt_jax.parallel.topology import described_devices
from yatt_jax.types import PyTree

SIZES = {
    "8b": DecoderConfig(
        vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, tied=False
    ),
    "1b": DecoderConfig(vocab=128256, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp=8192),
    "small": DecoderConfig(vocab=8192, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, mlp=2048),
}
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Move:
    """A leaf's way from one layout to another.

    Attributes:
      names: paths of the parameters that share it.
      way: "train -> rollout" or "rollout -> train".
      leaf: shape and dtype.
      source: where the leaf lies.
      target: where it goes.
      drops_fsdp_only: whether the same dimensions stay split over tensor as before, and only fsdp goes or comes.
    """

    names: tuple[str, ...]
    way: str
    leaf: jax.ShapeDtypeStruct
    source: NamedSharding
    target: NamedSharding
    drops_fsdp_only: bool

    @property
    def whole(self) -> int:
        """Bytes of the leaf."""
        return self.leaf.size * self.leaf.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a compiled move needs on each device, in bytes, and the collectives in it by kind."""

    input: int
    output: int
    temporary: int
    collectives: dict[str, int]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_repartition", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--topology", default="", help="compile for this TPU slice, as v5e:2x4 or v5p:2x2x4")
    parser.add_argument("--size", choices=tuple(SIZES), help="8b with --topology, else small")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--train", help="sizes of data,fsdp,tensor; by default fsdp x 2")
    parser.add_argument("--rollout", help="sizes of data,tensor; by default data x 2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    try:
        if args.topology:
            devices = described_devices(args.topology)
        else:
            jax.config.update("jax_num_cpu_devices", 8)
            devices = jax.devices()
        config = SIZES[args.size or ("8b" if args.topology else "small")]
        train, rollout = make_partitions(*_splits(args, len(devices)), devices, kv_heads=(config.kv_heads,))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = build("lm", config, args.dtype)
    gib = model.parameter_count * jnp.dtype(args.dtype).itemsize / 2**30
    print(
        f"{model.parameter_count / 1e9:.2f}e9 parameters, {args.dtype}, {gib:.2f} GiB; {len(devices)} x "
        f"{devices[0].device_kind}; train {_words(train)}; rollout {_words(rollout)}"
    )
    figures = compiled_figures(model, train, rollout) if args.topology else live(model, train, rollout, args.runs)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


def _splits(args: argparse.Namespace, devices: int) -> tuple[Split, Split]:
    tensor = 2 if devices % 2 == 0 else 1
    train, rollout = Split(1, -1, tensor), Split(-1, 1, tensor)
    try:
        if args.train:
            data, fsdp, tensor = (int(size) for size in args.train.split(","))
            train = Split(data, fsdp, tensor)
        if args.rollout:
            data, tensor = (int(size) for size in args.rollout.split(","))
            rollout = Split(data, 1, tensor)
    except ValueError:
        raise InputError("--train takes data,fsdp,tensor and --rollout data,tensor, as 1,4,2 and 4,2") from None
    return train, rollout


def _words(partition: Partition) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(partition.split).items())


def moves(model: Model, train: Partition, rollout: Partition) -> Iterator[Move]:
    """Every distinct move of a model's parameters, both ways; leaves that lie right in both layouts have none."""
    axes = dict(flatten(model.axes))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for path, leaf in flatten(model.abstract):
        alike.setdefault((leaf.shape, leaf.dtype, axes[path]), []).append(path)
    for (shape, dtype, names), paths in alike.items():
        leaf = jax.ShapeDtypeStruct(shape, dtype)
        here, there = train.sharding(names, shape), rollout.sharding(names, shape)
        if here.is_equivalent_to(there, len(shape)):
            continue
        alone = dataclasses.replace(train, rules={**train.rules, "embed": ()}).sharding(names, shape)
        only = alone.is_equivalent_to(there, len(shape))
        for way, source, target in (("train -> rollout", here, there), ("rollout -> train", there, here)):
            yield Move(tuple(paths), way, leaf, source, target, only)


def analyse(move: Move) -> Memory:
    """Compiles a move, exactly as ``repartition`` would, and asks the compiler what it needs."""
    compiled = compile_move(move.leaf, move.source, move.target)
    found = compiled.memory_analysis()
    if found is None:
        raise InputError("this backend's compiler reports no memory analysis")
    return Memory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.temp_size_in_bytes,
        collectives(compiled.as_text() or ""),
    )


def collectives(text: str) -> dict[str, int]:
    """Collectives of a compiled program: kind -> bytes of the largest result on a device, from its HLO text."""
    found: dict[str, int] = {}
    for match in COLLECTIVE.finditer(text):
        arrays = ARRAY.findall(match["result"])
        sizes = [jnp.dtype(_DTYPES[name]).itemsize * _count(dims) for name, dims in arrays if name in _DTYPES]
        found[match["kind"]] = max([found.get(match["kind"], 0), *sizes])
    return found


_DTYPES = {"f32": "float32", "bf16": "bfloat16", "s32": "int32", "u32": "uint32", "f16": "float16"}


def _count(dims: str) -> int:
    total = 1
    for size in filter(None, dims.split(",")):
        total *= int(size)
    return total


def compiled_figures(model: Model, train: Partition, rollout: Partition) -> list[dict[str, Any]]:
    """Prints and returns the memory that each move needs on a device."""
    print(
        f"{'MiB a device':<34}{'way':<18}{'leaf':>9}{'input':>9}{'output':>9}{'temp':>9}  collectives (largest result)"
    )
    figures = []
    for move in moves(model, train, rollout):
        memory = analyse(move)
        name = move.names[0].removeprefix("decoder/").removeprefix("layers/")
        name += f" (+{len(move.names) - 1})" if len(move.names) > 1 else ""
        sizes = [move.whole, memory.input, memory.output, memory.temporary]
        kinds = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in memory.collectives.items()) or "none"
        print(f"{name:<34}{move.way:<18}" + "".join(f"{size / MIB:>9.1f}" for size in sizes) + f"  {kinds}", flush=True)
        figures.append({"names": move.names, "way": move.way, "leaf": move.whole} | dataclasses.asdict(memory))
    return figures


def live(model: Model, train: Partition, rollout: Partition, runs: int) -> list[dict[str, Any]]:
    """Prints and returns time, bytes and rates of moving a model there and back, and of parking it."""
    compiles = Counter[str]()

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiles[event] += event.endswith("backend_compile_duration")

    where = model.shardings(train)
    make = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), model.abstract), out_shardings=where
    )
    params = jax.block_until_ready(make())
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        figures = [
            _moved("train -> rollout", model, params, rollout, compiles, runs),
            _moved("rollout -> train", model, measured(params, model.axes, rollout)[0], train, compiles, runs),
        ]
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    if can_park(jax.local_devices()[0]):
        figures += _parked(params, bytes_per_device(model.abstract, where) * jax.local_device_count(), runs)
    print(f"{'':<20}{'seconds':>10}{'GiB moved':>11}{'GiB/s':>8}{'GiB at most':>13}{'compiled':>10}{'shared':>8}")
    for found in figures:
        gib = found["bytes"] / 2**30
        print(
            f"{found['what']:<20}{found['seconds']:>10.4f}{gib:>11.3f}{gib / found['seconds']:>8.2f}"
            f"{_cell(found, 'peak', 2**30, '13.3f')}"
            f"{_cell(found, 'compiled', 1, '10.0f')}{_cell(found, 'shared', 1, '8.0f')}"
        )
    return figures


def _cell(found: dict[str, Any], name: str, unit: float, form: str) -> str:
    return format(found[name] / unit, form) if name in found else format("", form.split(".")[0])


def _moved(
    what: str, model: Model, params: PyTree, target: Partition, compiles: Counter[str], runs: int
) -> dict[str, Any]:
    before = compiles.total()
    found: list[Moved] = []
    for _ in range(runs + 1):
        laid_out, moved = measured(params, model.axes, target, wait=True)
        release(laid_out, params)
        found.append(moved)
    last = dataclasses.asdict(found[-1])
    return last | {
        "what": what,
        "seconds": statistics.median(moved.seconds or 0.0 for moved in found[1:]),
        "first_seconds": found[0].seconds,
        "bytes": last["received"],
        "compiled": compiles.total() - before,
    }


def _parked(params: PyTree, size: int, runs: int) -> list[dict[str, Any]]:
    there: list[float] = []
    back: list[float] = []

    def timed(times: list[float], call: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
        begun = time.perf_counter()
        result = jax.block_until_ready(call(tree))
        times.append(time.perf_counter() - begun)
        return result

    for _ in range(runs + 1):
        params = timed(back, fetch, timed(there, park, params))
    rows: Sequence[tuple[str, list[float]]] = (("park", there), ("fetch", back))
    return [{"what": what, "seconds": statistics.median(times[1:]), "bytes": size} for what, times in rows]


if __name__ == "__main__":
    sys.exit(main())
