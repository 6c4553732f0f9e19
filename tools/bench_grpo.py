"""Times whole GRPO steps, by themselves or beside another trainer: ``python -m tools.bench_grpo [--peer trl]``.

A step samples, scores with a frozen reference and trains once on what it sampled: the command's own loop, with rewards,
metrics and files. All responses have the same length, so that both trainers sample, score and train the same number of
tokens. The peer runs in a process of its own straight before or after, in turns, ``--rounds`` times; the first step of
each process compiles or warms up and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yatt_jax.config import default_config, parse
from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.plan import make_plan
from yatt_jax.controller.start import run
from yatt_jax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_grpo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="model folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--micro_tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", choices=("trl",), help="the same with this as well")
    parser.add_argument("--only", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if args.only:
        seconds = ours(args) if args.only == "ours" else trl(args)
        print(json.dumps(seconds))
        return 0
    seconds: dict[str, list[dict[str, float]]] = {}
    try:
        for _ in range(args.rounds):
            for name in ("ours", *([args.peer] if args.peer else [])):
                seconds.setdefault(name, []).extend(_child(args, name))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = _figures(seconds, args.prompts * args.samples * args.new_tokens)
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:>9.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures | {"steps": seconds}, indent=2) + "\n", "utf-8")
    return 0


def _child(args: argparse.Namespace, name: str) -> list[dict[str, float]]:
    """Steps of one trainer, in a process of its own."""
    numbers = ("prompts", "samples", "new_tokens", "micro_tokens", "steps")
    flags = [f"--{key}={getattr(args, key)}" for key in ("model", *numbers)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_grpo", f"--only={name}", *flags], capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(f"{name} ended with status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _figures(seconds: dict[str, list[dict[str, float]]], tokens: int) -> dict[str, float]:
    medians = {name: statistics.median(step["step"] for step in steps) for name, steps in seconds.items()}
    found = {}
    for name, steps in seconds.items():
        found |= {f"{name}: seconds of a step": medians[name], f"{name}: tokens/s": tokens / medians[name]}
        for phase in steps[0].keys() - {"step"}:
            found[f"{name}: {phase}"] = statistics.median(step[phase] for step in steps)
    for name, value in medians.items():
        if name != "ours":
            found[f"times {name}"] = value / medians["ours"]
    return found


def ours(args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each step after the first, by phase."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            plan = make_plan(parse(_config(args, Path(folder))))
            status = run(plan, workdir, Hosts(), resume="never", overwrite=False)
        if status:
            raise InputError(f"the run ended with status {status}")
        lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line) for line in lines if line.strip()]
    phases = ("rollout", "score", "train")
    return [
        {"step": step["time/step"]} | {phase: step.get(f"time/{phase}", 0.0) for phase in phases}
        for step in steps
        if step["step"] > 1
    ]


def _config(args: argparse.Namespace, folder: Path) -> Any:
    config = default_config("grpo")
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"messages": _prompt(i)}) + "\n" for i in range(64)), "utf-8")
    config.model.path = args.model
    config.model.remat = "none"
    config.data.train = (str(data),)
    config.data.max_prompt_tokens = 64
    config.rollout.prompts = args.prompts
    config.rollout.samples_per_prompt = args.samples
    config.rollout.sampling.max_new_tokens = args.new_tokens
    config.rollout.sampling.min_new_tokens = args.new_tokens
    config.rewards = {"sentiment": {"fn": "yatt_jax.rewards.rules:sentiment"}}
    config.steps = args.steps + 1
    config.hyper.epochs = 1
    config.hyper.minibatches = 1
    config.hyper.old_logprobs = "current"
    config.train.micro_tokens = args.micro_tokens
    config.actor_optimizer.lr = 1e-6
    config.evaluation.every = 0
    config.report.export = False
    config.checkpoint.every_steps = 0
    return config


def _prompt(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write one sentence about the number {i}."}]


def trl(args: argparse.Namespace) -> list[dict[str, float]]:
    """The same of TRL's trainer."""
    import datasets  # pyright: ignore[reportMissingImports]
    import transformers
    import trl as peer  # pyright: ignore[reportMissingImports]

    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        """Notes how long each step takes."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as folder:
        config = peer.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=args.prompts * args.samples,
            num_generations=args.samples,
            max_completion_length=args.new_tokens,
            generation_kwargs={"min_new_tokens": args.new_tokens},
            beta=0.04,
            max_steps=args.steps + 1,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        peer.GRPOTrainer(
            model=args.model,
            reward_funcs=lambda completions, **_: [float(len(c[0]["content"])) for c in completions],
            args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": _prompt(i)} for i in range(64)]),
            processing_class=transformers.AutoTokenizer.from_pretrained(args.model),
            callbacks=[Clock()],
        ).train()
    return [{"step": s} for s in seconds[1:]]


if __name__ == "__main__":
    sys.exit(main())
