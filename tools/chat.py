"""Talk to a model: ``python -m tools.chat DIR`` with a run directory, a model folder or a GGUF file.

Type a message and press Enter; ``/reset`` forgets the conversation, ``/quit`` or end-of-file leaves. With
``--once TEXT`` it answers one message and exits. A model that was trained by attribute-conditioned fine-tuning is
steered by ``--attributes quality:4,humor:0``, and anew by ``/attributes LABEL`` (``/attributes`` alone: no more).
"""

from __future__ import annotations

import argparse
import sys

from yatt_jax.data.attributes import condition, parse_label
from yatt_jax.data.conversation import Turn
from yatt_jax.data.tokenizer import render
from yatt_jax.errors import InputError
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.synth.speaker import Speaker
from yatt_jax.types import Prompt


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.chat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="run directory, model folder or GGUF file")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--max_prompt_tokens", type=int, default=2048, help="longest conversation before an answer")
    parser.add_argument("--attributes", default="", metavar="LABEL", help='of the answers, as "quality:4,humor:0"')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", metavar="TEXT", help="answer one message and exit")
    args = parser.parse_args(argv)
    try:
        sampling = Sampling(temperature=args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens)
        beginning = _beginning(args.attributes)
        speaker = Speaker(args.path, rows=1, max_prompt_tokens=args.max_prompt_tokens, sampling=sampling)
    except (InputError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    history: list[Turn] = [{"role": "system", "content": args.system}] if args.system else []
    turn = 0
    while (text := args.once if args.once is not None else _read()) is not None:
        if text == "/reset":
            history = history[:1] if args.system else []
            continue
        if text.split(" ")[0] == "/attributes":
            try:
                beginning = _beginning(text.removeprefix("/attributes").strip())
            except InputError as error:
                print(f"error: {error}", file=sys.stderr)
            continue
        if not text.strip():
            if args.once is not None:
                print("error: --once needs a text", file=sys.stderr)
                return 2
            continue
        history.append({"role": "user", "content": text})
        prompt = speaker.begun(_prompt(speaker, history, text, turn), beginning)
        if not speaker.fits(prompt):
            print(f"error: {len(prompt.tokens)} tokens; /reset, or raise --max_prompt_tokens", file=sys.stderr)
            history.pop()
            if args.once is not None:
                return 2
            continue
        (sample,) = speaker.answer([prompt], [turn], seed=args.seed)
        print(sample.completion, flush=True)
        # What the answer began with belongs to it, as in the conversations that the model was trained on.
        history.append({"role": "assistant", "content": beginning + sample.completion})
        turn += 1
        if args.once is not None:
            break
    return 0


def _beginning(label: str) -> str:
    """What answers with these attributes begin with."""
    if not label:
        return ""
    parse_label(label, "attributes")
    return condition(label)


def _prompt(speaker: Speaker, history: list[Turn], text: str, turn: int) -> Prompt:
    """The conversation as a prompt; a model without a chat template continues the text as it stands."""
    rendered = render(speaker.tokenizer, history) if speaker.tokenizer.chat_template else text
    return Prompt(list(history), rendered, [], {}, "conversation", turn)


def _read() -> str | None:
    try:
        text = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text == "/quit" else text


if __name__ == "__main__":
    sys.exit(main())
