"""Times attention by itself, form against form: ``python -m tools.bench_attention``.

Packed rows, forward and backward, in the form without kernels, in blocks, and in what the models choose on this device;
then a decode step of one layer over a cache, with its keys laid out in both ways. Forms take turns within a run, and
medians count. ``--json FILE`` writes the same figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from yatt_jax.models.attention import Form, attend, choose
from yatt_jax.ops.attention import Cached, Packed
from yatt_jax.parallel.partition import Split, make_partitions

_LAYERS = 4  # caches that a decode step goes through, so that they do not all lie in a processor's own cache
_STEPS = 8


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_attention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv_heads", type=int, default=3)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 1024, 2048, 4096], help="lengths of packed rows")
    parser.add_argument("--document", type=int, default=256, help="mean length of the documents in a row")
    parser.add_argument("--rows", type=int, default=32, help="rows that decode")
    parser.add_argument("--places", type=int, nargs="*", default=[128, 320], help="lengths of caches")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if args.heads % args.kv_heads:
        print(f"error: --heads={args.heads} is not a multiple of --kv_heads={args.kv_heads}", file=sys.stderr)
        return 2
    figures: dict[str, dict[str, float]] = {}
    with make_partitions(Split(), Split(), jax.devices()[:1])[0].active():
        for tokens in args.tokens:
            figures[f"gradient {tokens}"] = measure(packed(args, tokens), args.runs)
        for places in args.places:
            found = measure(decoding(args, places), args.runs)
            figures[f"decode {places}"] = {form: seconds / _LAYERS / _STEPS for form, seconds in found.items()}
    print(f"{jax.devices()[0].device_kind}, {args.dtype}, milliseconds, medians of {args.runs}")
    for what, by_form in figures.items():
        print(f"{what:<16}" + "".join(f"{form:>14} {1e3 * seconds:>8.2f}" for form, seconds in by_form.items()))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


def measure(functions: Mapping[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Median seconds of each function. They take turns, after a first call that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(runs + 1):
        for name, function in functions.items():
            begun = time.perf_counter()
            jax.block_until_ready(function())
            if run:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


def packed(args: argparse.Namespace, tokens: int) -> dict[str, Callable[[], Any]]:
    """The gradient of attention over one row of documents, by form."""
    generator = np.random.default_rng(0)
    documents = max(1, tokens // args.document)
    cuts = np.sort(generator.choice(np.arange(1, tokens), documents - 1, replace=False))
    seen = Packed(jnp.asarray(np.searchsorted(cuts, np.arange(tokens), side="right")[None] + 1, jnp.int32))
    q = jnp.asarray(generator.standard_normal((1, tokens, args.heads, args.head_dim)), args.dtype)
    k, v = jnp.asarray(generator.standard_normal((2, 1, args.kv_heads, tokens, args.head_dim)), args.dtype)
    chosen = choose(jax.devices()[0], seen, tokens=tokens, head_dim=args.head_dim, dtype=args.dtype, softcap=0.0)

    def gradient(form: Form) -> Callable[[], Any]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array, seen: Packed) -> jax.Array:
            out = attend(q, k, v, seen, windows=(0,), which=0, scale=args.head_dim**-0.5, softcap=0.0, form=form)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        run = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        return lambda: run(q, k, v, seen)

    forms: tuple[Form, ...] = ("plain", "blocks", chosen)
    return {form: gradient(form) for form in forms}


def decoding(args: argparse.Namespace, places: int) -> dict[str, Callable[[], Any]]:
    """Decode steps over a few layers' full caches in the form chosen, by the layout of their keys."""
    generator = np.random.default_rng(0)
    q = jnp.asarray(generator.standard_normal((args.rows, 1, args.heads, args.head_dim)), args.dtype)
    shape = _LAYERS, args.rows, args.kv_heads, places, args.head_dim
    keys, values = (jnp.asarray(generator.standard_normal(shape, np.float32), args.dtype) for _ in range(2))
    start = jnp.full(args.rows, places - 1, jnp.int32)

    def step(places_last: bool) -> Callable[[], Any]:
        def run(q: jax.Array, layers: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            def once(_: jax.Array, q: jax.Array) -> jax.Array:
                for keys, values in layers:
                    seen = Cached(start, jnp.int32(0), places_last)
                    q = attend(q, keys, values, seen, windows=(0,), which=0, scale=args.head_dim**-0.5, softcap=0.0)
                return q

            return jax.lax.fori_loop(0, _STEPS, once, q)

        turned = jnp.swapaxes(keys, 3, 4) if places_last else keys
        layers = [(turned[i : i + 1], values[i : i + 1]) for i in range(_LAYERS)]
        compiled = jax.jit(run)
        return lambda: compiled(q, layers)

    return {"[S, K]": step(False), "[K, S]": step(True)}


if __name__ == "__main__":
    sys.exit(main())
