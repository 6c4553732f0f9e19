"""Writes a model's answers to prompts as data: ``python -m tools.respond MODEL --data FILE --out FILE``.

With ``--attributes quality:4,humor:0`` (which may be given several times) answers are conditioned on attributes, as a
model was trained to by attribute-conditioned fine-tuning. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from yatt_jax.data.attributes import parse_label
from yatt_jax.data.config import DataConfig
from yatt_jax.data.records import open_table
from yatt_jax.errors import InputError, RunFailure
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.synth.output import Output
from yatt_jax.synth.respond import respond
from yatt_jax.synth.speaker import Speaker, find_model, identity

TOLD = (
    "data attributes samples temperature top_p max_new_tokens max_prompt_tokens system chat_template compute_dtype seed"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.respond", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="run directory, model folder or GGUF file")
    parser.add_argument("--data", required=True, help="prompts: a file, pattern or saved data set")
    parser.add_argument("--out", required=True, type=Path, help="file to write, .jsonl")
    parser.add_argument("--attributes", action="append", default=[], metavar="LABEL", help='as "quality:4,humor:0"')
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt (for each label)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longer answers are left out")
    parser.add_argument("--max_prompt_tokens", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--system", default="", help="system message of conversations that have none")
    parser.add_argument("--chat_template", default="auto", help="jinja file, in place of the model's own template")
    parser.add_argument("--batch", type=int, default=64, help="prompts at a time")
    parser.add_argument("--compute_dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="discard what an earlier command wrote")
    args = parser.parse_args(argv)
    try:
        path, table = find_model(args.model), open_table(args.data)
        for label in args.attributes:
            parse_label(label, "--attributes")
        for name in ("samples", "batch"):
            if getattr(args, name) < 1:
                raise InputError(f"--{name}={getattr(args, name)}: must be at least 1")
        settings = {name: getattr(args, name) for name in TOLD.split()}
        settings |= {"records": len(table), "model": identity(path)}
        output = Output(args.out, settings, overwrite=args.overwrite)
        if not output.whole:
            labels = args.attributes or [""]
            speaker = Speaker(
                path,
                rows=args.batch * len(labels) * args.samples,
                max_prompt_tokens=args.max_prompt_tokens,
                sampling=Sampling(args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens),
                data=DataConfig(system=args.system, chat_template=args.chat_template),
                compute_dtype=args.compute_dtype,
            )
            respond(speaker, table, output, labels=labels, samples=args.samples, batch=args.batch, seed=args.seed)
    except (ValueError, RunFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status if isinstance(error, InputError | RunFailure) else 2
    print(f"{args.out}: " + ", ".join(f"{name} {count}" for name, count in sorted(output.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
