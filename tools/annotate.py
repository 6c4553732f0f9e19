"""Rates the answers of conversations: ``python -m tools.annotate MODEL --data FILE --out FILE --attributes NAME,...``.

MODEL is a regression reward model (a ``reward_regression`` run, or its export); FILE holds conversations in any format
of fine-tuning. Each answer gets a label such as "quality:4,humor:0", and what is written is what attribute-conditioned
fine-tuning reads. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from yatt_jax.errors import InputError, RunFailure
from yatt_jax.synth.output import Output
from yatt_jax.synth.rate import Rater, Scale, annotate, means, open_conversations
from yatt_jax.synth.speaker import find_model, identity


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.annotate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="run directory or folder of a regression reward model")
    parser.add_argument("--data", required=True, help="conversations: a file, pattern or saved data set")
    parser.add_argument("--out", required=True, type=Path, help="file to write, .jsonl")
    parser.add_argument("--attributes", required=True, help="names of the attributes that are wanted, by commas")
    parser.add_argument("--format", default="auto", help="format of the records")
    parser.add_argument("--low", type=float, default=0.0, help="lowest rating")
    parser.add_argument("--high", type=float, default=4.0, help="highest rating")
    parser.add_argument("--step", type=float, default=1.0, help="ratings are rounded to multiples of it")
    parser.add_argument("--max_tokens", type=int, default=1024, help="longest conversation; others are left out")
    parser.add_argument("--chat_template", default="auto", help="jinja file, in place of the model's own template")
    parser.add_argument("--batch", type=int, default=64, help="conversations at a time")
    parser.add_argument("--compute_dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--overwrite", action="store_true", help="discard what an earlier command wrote")
    args = parser.parse_args(argv)
    try:
        path, names = find_model(args.model), tuple(args.attributes.split(","))
        scale = Scale(args.low, args.high, args.step)
        form, table = open_conversations(args.data, args.format)
        told = ("data", "format", "low", "high", "step", "max_tokens", "chat_template", "compute_dtype", "attributes")
        settings = {name: getattr(args, name) for name in told} | {"records": len(table), "model": identity(path)}
        output = Output(args.out, settings, overwrite=args.overwrite)
        if not output.whole:
            rater = Rater(
                path,
                names,
                max_tokens=args.max_tokens,
                rows=args.batch,
                chat_template=args.chat_template,
                compute_dtype=args.compute_dtype,
            )
            annotate(rater, form, table, output, scale=scale, batch=args.batch)
    except (ValueError, RunFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status if isinstance(error, InputError | RunFailure) else 2
    counts = output.counts
    print(f"{args.out}: {counts['written']} conversations; {counts['not rated']} could not be rated")
    print("mean ratings: " + ", ".join(f"{name} {value:.3f}" for name, value in means(counts).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
