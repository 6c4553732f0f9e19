"""Times the sampling engine, by itself or beside another system: ``python -m tools.bench_rollout [--model DIR]``.

Prints a table and, with ``--json FILE``, writes the same figures. ``--peer transformers`` samples the same prompts with
``generate`` in this process, in turns with the engine, where torch is installed; it samples them in batches of
``--rows``, each as long as its longest response.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tools.measure import Compiled, matmul_peak, peak_bytes, timed
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.data.config import DataError
from yatt_jax.io import hf
from yatt_jax.models.build import Model
from yatt_jax.models.layers import Projection
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.rollout.engine import Ask, Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Params, Prompt


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_rollout", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="model folder")
    parser.add_argument("--rows", type=int, default=32, help="slots of the engine, rows of the peer's batches")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens of a response, or most of them")
    parser.add_argument("--mean", type=float, default=0, help="mean of geometric lengths; 0: all are --new_tokens long")
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer", choices=("transformers",), help="sample the same with this as well")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    try:
        bench = Bench(args)
    except (ValueError, FileNotFoundError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = bench.measure(args.runs)
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:>10.3g}" if isinstance(value, float) else f"{name:<{width}}  {value:>10}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


class Bench:
    """One setting, measured.

    Args:
      args: of the command line.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        _, partition = make_partitions(Split(), Split())
        self._model, self._params = hf.load_model(args.model, "lm", partition)
        tokenizer = tokenizers.load_tokenizer(args.model)
        prompts = [p for p in _prompts(tokenizer, args.prompts) for _ in range(args.samples)]
        generator = np.random.default_rng(0)
        lengths = np.full(len(prompts), args.new_tokens)
        if args.mean:
            lengths = np.minimum(generator.geometric(1 / args.mean, len(prompts)), args.new_tokens)
        self._asked = [Ask(p, i, limit=int(n)) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        self._engine = Engine(
            self._model,
            tokenizer,
            partition,
            rows=args.rows,
            max_prompt_tokens=max(len(p.tokens) for p in prompts),
            max_new_tokens=args.new_tokens,
            chunk=args.chunk,
        )
        self._sampling = Sampling(max_new_tokens=args.new_tokens)
        self._peer = _transformers(args.model, self._asked, args.rows) if args.peer else None

    def measure(self, runs: int) -> dict[str, Any]:
        """Figures by name; times are medians."""
        engine, asked = self._engine, self._asked
        with Compiled() as compiled:
            self._sample(asked)
        stats = engine.stats
        written = sum(ask.limit for ask in asked)
        ours, theirs, prefill = [], [], []
        short = [Ask(ask.prompt, ask.sample_id, limit=1) for ask in asked[: self._args.rows]]
        for _ in range(runs):  # in turns: what else the machine does then disturbs all of them alike
            ours.append(_seconds(lambda: self._sample(asked)))
            prefill.append(_seconds(lambda: self._sample(short)))
            if self._peer:
                theirs.append(_seconds(self._peer))
        seconds = statistics.median(ours)
        matmuls = matmul_seconds(self._model, self._params, self._args.rows, runs)
        step = (seconds - statistics.median(prefill)) / max(1, stats.steps - 1)
        config = self._model.config
        body = self._model.parameter_count - config.vocab * config.hidden * (1 if config.tied else 2)
        flops = 2 * (body * (written + stats.prompt_tokens) + config.vocab * config.hidden * written)
        found = {
            "tokens": written,
            "seconds": seconds,
            "tokens/s": written / seconds,
            "slot fill": stats.fill,
            "decode steps": stats.steps,
            "prefill padding": 1 - stats.prompt_tokens / max(1, stats.prompt_computed),
            "first tokens of a batch, seconds": statistics.median(prefill),
            "compiled programs": compiled.count,
            "compile seconds": compiled.seconds,
            "peak GiB": peak_bytes() / 2**30,
            "GFLOP/s": flops / seconds / 1e9,
            "GFLOP/s of one large product": matmul_peak(),
            "products of a decode step, ms": 1e3 * matmuls,
        }
        if not self._args.mean and len(asked) <= self._args.rows:
            found |= {"decode step, ms": 1e3 * step, "share of it in products": matmuls / step}
        if theirs:
            other = statistics.median(theirs)
            found |= {f"{self._args.peer} tokens/s": written / other, f"times {self._args.peer}": other / seconds}
        return found

    def _sample(self, asked: Sequence[Ask]) -> None:
        self._engine.sample(self._params, asked, self._sampling, seed=0)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _prompts(tokenizer: Any, count: int) -> list[Prompt]:
    texts = [f"Write one sentence about the number {i}." for i in range(count)]
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False)
            for t in texts
        ]
    encoded = tokenizers.encode(tokenizer, texts)
    return [Prompt([], text, ids, {}, "bench", i) for i, (text, ids) in enumerate(zip(texts, encoded, strict=True))]


def matmul_seconds(model: Model, params: Params, rows: int, runs: int) -> float:
    """Seconds that the matrix products of one decode step take by themselves: each layer's, and the output's."""
    lm = model.bind(params)
    projections = [
        module
        for block in lm.decoder.blocks(lm.decoder.unstack())
        for _, module in nnx.iter_modules(block)
        if isinstance(module, Projection)
    ]
    kernels = [p.kernel[...].reshape(-1, math.prod(p.kernel.shape[-p.contract :])) for p in projections]
    kernels.append(lm.output_matrix())
    inputs = {side: jnp.ones((rows, side), kernels[-1].dtype) for side in {k.shape[1] for k in kernels}}

    @jax.jit
    def products(inputs: dict[int, jax.Array], kernels: list[jax.Array]) -> list[jax.Array]:
        return [jnp.einsum("bk,nk->bn", inputs[kernel.shape[1]], kernel).sum() for kernel in kernels]

    return timed(lambda: jax.block_until_ready(products(inputs, kernels)), max(runs, 7))[0]


def _transformers(model: str, asked: Sequence[Ask], rows: int) -> Callable[[], None]:
    """A call that samples the same prompts with ``generate``, in batches."""
    import torch
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    longest = max(len(ask.prompt.tokens) for ask in asked)
    batches = []
    for first in range(0, len(asked), rows):
        part = asked[first : first + rows]
        tokens, mask = np.zeros((2, len(part), longest), np.int64)
        for row, ask in enumerate(part):  # padded on the left
            tokens[row, longest - len(ask.prompt.tokens) :] = ask.prompt.tokens
            mask[row, longest - len(ask.prompt.tokens) :] = 1
        batches.append((torch.from_numpy(tokens), torch.from_numpy(mask), max(ask.limit for ask in part)))

    def generate() -> None:
        with torch.no_grad():
            for tokens, mask, new in batches:
                network.generate(
                    input_ids=tokens, attention_mask=mask, do_sample=True, max_new_tokens=new, min_new_tokens=new
                )

    return generate


if __name__ == "__main__":
    sys.exit(main())
