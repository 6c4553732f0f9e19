"""Talk to a model: ``python -m tools.chat DIR`` with a run directory, a model folder or a GGUF file.

Type a message and press Enter; ``/reset`` forgets the conversation, ``/quit`` or end-of-file leaves. With
``--once TEXT`` it answers one message and exits.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.io import hf
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.rollout.engine import Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Prompt


def model_path(path: str) -> Path:
    """The model folder meant by a run directory, a model folder or a GGUF file.

    Raises:
      FileNotFoundError: nothing there to load, with what was looked for.
    """
    given = Path(path)
    for candidate in (given, given / "export"):
        if candidate.suffix == ".gguf" and candidate.is_file():
            return candidate
        if (candidate / "config.json").exists() and any(candidate.glob("*.safetensors")):
            return candidate
    raise FileNotFoundError(
        f"{given}: no model here; expected a folder with config.json and safetensors, a run directory with export/, "
        "or a .gguf file"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.chat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="run directory, model folder or GGUF file")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--max_prompt_tokens", type=int, default=2048, help="longest conversation before an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", metavar="TEXT", help="answer one message and exit")
    args = parser.parse_args(argv)
    try:
        path = model_path(args.path)
        sampling = Sampling(temperature=args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens)
        _, partition = make_partitions(Split(), Split())
        model, params = hf.load_model(str(path), "lm", partition)
        tokenizer = tokenizers.load_tokenizer(str(path))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stops = tokenizers.stop_token_ids(tokenizer, path if path.is_dir() else None)
    sampling = dataclasses.replace(sampling, stop_token_ids=stops)
    engine = Engine(
        model,
        tokenizer,
        partition,
        rows=1,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
    )
    history = [{"role": "system", "content": args.system}] if args.system else []
    turn = 0
    while (text := args.once if args.once is not None else _read()) is not None:
        if text == "/reset":
            history = history[:1] if args.system else []
            continue
        if not text.strip():
            if args.once is not None:
                print("error: --once needs a text", file=sys.stderr)
                return 2
            continue
        history.append({"role": "user", "content": text})
        # A model without a chat template continues the text as it stands.
        rendered = tokenizers.render(tokenizer, history) if tokenizer.chat_template else text
        (ids,) = tokenizers.encode(tokenizer, [rendered])
        prompt = Prompt(history, rendered, ids, {}, "conversation", turn)
        _, samples = engine.generate(
            params, [prompt], sampling, seed=args.seed, sample_ids=[turn], groups=[0], version=0
        )
        print(samples[0].completion, flush=True)
        history.append({"role": "assistant", "content": samples[0].completion})
        turn += 1
        if args.once is not None:
            break
    return 0


def _read() -> str | None:
    try:
        text = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text == "/quit" else text


if __name__ == "__main__":
    sys.exit(main())
