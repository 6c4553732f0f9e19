"""Times the phases of a PPO step at one shape: ``python -m tools.bench_step [--model DIR]``.

Prints a table and, with ``--json FILE``, writes the same figures. Rates of matrix products are set beside the rate that
this machine reaches on one large product, so that figures from two machines can be compared as shares.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.measure import matmul_peak, timed
from yatt_jax.config import OnlineRun, default_config, parse
from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.load import load_weights
from yatt_jax.controller.online_plan import OnlinePlan, make_online_plan
from yatt_jax.controller.programs import make_programs
from yatt_jax.controller.rows import Mover
from yatt_jax.controller.update import init_state
from yatt_jax.errors import InputError
from yatt_jax.parallel.pack import Packed
from yatt_jax.rollout.engine import Engine
from yatt_jax.types import Prompt


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="model folder or GGUF file")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=40)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--micro_rows", type=int, default=8)
    parser.add_argument("--remat", default="none", choices=("none", "full"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    try:
        plan = _plan(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = measure(plan, args.prompt_tokens, args.runs)
    print(f"{args.rows} rows of {args.prompt_tokens} + {args.new_tokens} tokens, medians of {args.runs}")
    print(f"one large matrix product: {figures['peak_gflops']:.0f} GFLOP/s")
    print(f"{'phase':<16}{'seconds':>9}{'tokens/s':>10}{'GFLOP/s':>9}{'of peak':>9}{'first call':>12}")
    for name, found in figures["phases"].items():
        share = found["gflops"] / figures["peak_gflops"]
        print(
            f"{name:<16}{found['seconds']:>9.2f}{found['tokens_per_second']:>10.1f}{found['gflops']:>9.0f}"
            f"{share:>9.0%}{found['first_seconds']:>12.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


def _plan(args: argparse.Namespace) -> OnlinePlan:
    config = default_config("ppo")
    config.model.path = args.model
    config.model.remat = args.remat
    config.data.max_prompt_tokens = args.prompt_tokens
    config.rollout.prompts = args.rows
    config.rollout.sampling.max_new_tokens = args.new_tokens
    config.rollout.sampling.min_new_tokens = args.new_tokens
    config.rollout.filters_in_scoring = "off"
    config.hyper.epochs = config.hyper.minibatches = 1
    config.train.micro_rows = args.micro_rows
    config.rewards = {"length": {"fn": "yatt_jax.rewards.rules:length"}}
    run = parse(config)
    assert isinstance(run, OnlineRun)
    return make_online_plan(run)


def measure(plan: OnlinePlan, prompt_tokens: int, runs: int) -> dict[str, Any]:
    """Median seconds and rates of each phase.

    Args:
      plan: a run whose responses all have the same length.
      prompt_tokens: tokens of each prompt.
      runs: timed calls of each phase, after a first one that compiles.
    """
    programs, rows = make_programs(plan), plan.rows
    actor = load_weights(plan, "actor", None)
    reference = load_weights(plan, "reference", actor)
    states = {
        role: init_state(params, programs.transforms[role], plan.train)
        for role, params in (("critic", load_weights(plan, "critic", actor)), ("actor", actor))
    }
    new_tokens = plan.config.rollout.sampling.max_new_tokens
    engine = Engine(
        plan.models["actor"],
        plan.tokenizer,
        plan.rollout,
        rows=rows,
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
    )
    generator = np.random.default_rng(0)
    prompts = [
        Prompt([], "", generator.integers(3, plan.models["actor"].config.vocab, prompt_tokens).tolist(), {}, "bench", i)
        for i in range(rows)
    ]
    ids = list(range(rows))
    sample = lambda: engine.generate(  # noqa: E731
        states["actor"].params, prompts, plan.config.rollout.sampling, seed=0, sample_ids=ids, groups=ids, version=0
    )
    phases = {"sample": timed(sample, runs)}
    mover = Mover(plan, Hosts())
    rollout, rewards, placed = mover.place(sample()[0], np.linspace(0, 1, rows))
    packed = Packed(rollout, placed.layout)
    temperature = jnp.float32(1)
    scores = {}
    for role in plan.algo.scored_by(plan.config.hyper):
        params = states[role].params if role in states else reference

        def score(role: str = role, params: Any = params) -> None:
            scores[role] = jax.block_until_ready(programs.score[role](params, packed, temperature))

        phases[f"score {role}"] = timed(score, runs)
    batch, _ = programs.prepare(rollout, rewards, scores, jnp.float32(0.05))
    (minibatch,) = mover.minibatches(batch, placed, 0)
    for role in plan.algo.TRAINS:

        def update(role: str = role) -> None:
            states[role], metrics = programs.update[role](states[role], minibatch, temperature)
            jax.block_until_ready(metrics)

        phases[f"update {role}"] = timed(update, runs)
    return {"peak_gflops": matmul_peak(), "phases": _rates(plan, phases, prompt_tokens, new_tokens)}


def _rates(
    plan: OnlinePlan, phases: dict[str, tuple[float, float]], prompt_tokens: int, new_tokens: int
) -> dict[str, dict[str, float]]:
    """Useful FLOPs: two for each parameter of a product and token, three times that with the gradient."""
    config = plan.models["actor"].config
    table = config.vocab * config.hidden
    body = plan.models["actor"].parameter_count - table * (1 if config.tied else 2)
    places, written = plan.rows * (prompt_tokens + new_tokens), plan.rows * new_tokens
    found = {}
    for name, (seconds, first) in phases.items():
        with_logits = 0 if "critic" in name else written
        flops = 2 * (body * places + table * with_logits) * (3 if name.startswith("update") else 1)
        tokens = written if name == "sample" else places
        found[name] = {
            "seconds": seconds,
            "first_seconds": first,
            "tokens_per_second": tokens / seconds,
            "gflops": flops / seconds / 1e9,
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
