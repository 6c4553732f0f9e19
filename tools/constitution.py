"""Preferences by principles: ``python -m tools.constitution MODEL --data FILE --principles FILE --out FILE``.

The model answers prompts, criticises its answers and writes them anew (``--pairs=revision``), or answers twice and says
which answer a principle prefers (``--pairs=choice``). What is written trains a reward model or DPO; with
``--form=answers`` it holds the preferred answers alone, for fine-tuning. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from yatt_jax.data.config import DataConfig
from yatt_jax.data.records import open_table
from yatt_jax.errors import InputError, RunFailure
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.synth.constitution import Constitution, read_principles
from yatt_jax.synth.output import Output
from yatt_jax.synth.speaker import Speaker, find_model, identity

TOLD = (
    "data pairs form rounds temperature top_p max_new_tokens max_prompt_tokens system chat_template compute_dtype seed"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.constitution", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="run directory, model folder or GGUF file")
    parser.add_argument("--data", required=True, help="prompts: a file, pattern or saved data set")
    parser.add_argument("--principles", required=True, help='records {"critique", "revision", "choice"}')
    parser.add_argument("--out", required=True, type=Path, help="file to write, .jsonl")
    parser.add_argument("--pairs", default="revision", choices=("revision", "choice"), help="how pairs are made")
    parser.add_argument("--form", default="preferences", choices=("preferences", "answers"), help="what is written")
    parser.add_argument("--rounds", type=int, default=1, help="critiques and revisions of an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longer answers and critiques are left out")
    parser.add_argument("--max_prompt_tokens", type=int, default=2048, help="longest conversation before an answer")
    parser.add_argument("--system", default="", help="system message of conversations that have none")
    parser.add_argument("--chat_template", default="auto", help="jinja file, in place of the model's own template")
    parser.add_argument("--batch", type=int, default=64, help="prompts at a time")
    parser.add_argument("--compute_dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="discard what an earlier command wrote")
    args = parser.parse_args(argv)
    try:
        path, table = find_model(args.model), open_table(args.data)
        for name in ("rounds", "batch"):
            if getattr(args, name) < 1:
                raise InputError(f"--{name}={getattr(args, name)}: must be at least 1")
        if args.pairs == "choice" and args.rounds != 1:
            raise InputError(f"--rounds={args.rounds}: counts revisions, and --pairs=choice makes none")
        principles = read_principles(args.principles, args.pairs)
        settings = {name: getattr(args, name) for name in TOLD.split()}
        settings |= {"records": len(table), "model": identity(path)}
        settings["principles"] = hashlib.sha256(repr(principles).encode()).hexdigest()[:16]
        output = Output(args.out, settings, overwrite=args.overwrite)
        if not output.whole:
            speaker = Speaker(
                path,
                rows=args.batch,
                max_prompt_tokens=args.max_prompt_tokens,
                sampling=Sampling(args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens),
                data=DataConfig(system=args.system, chat_template=args.chat_template),
                compute_dtype=args.compute_dtype,
            )
            constitution = Constitution(
                speaker, principles, pairs=args.pairs, form=args.form, rounds=args.rounds, seed=args.seed
            )
            constitution.write(table, output, args.batch)
    except (ValueError, RunFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status if isinstance(error, InputError | RunFailure) else 2
    counts = {name: count for name, count in sorted(output.counts.items()) if count}
    print(f"{args.out}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
