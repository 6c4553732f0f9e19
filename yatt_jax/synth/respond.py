"""Answers to prompts as data to train on, also at wanted attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from yatt_jax.data.attributes import condition
from yatt_jax.data.conversation import Turn
from yatt_jax.data.records import Table
from yatt_jax.errors import RunFailure
from yatt_jax.synth.output import Output
from yatt_jax.synth.speaker import Speaker
from yatt_jax.types import Prompt, Sample

WHOLE = ("stop", "stop_string")


def respond(
    speaker: Speaker,
    prompts: Table,
    output: Output,
    *,
    labels: Sequence[str] = ("",),
    samples: int = 1,
    batch: int = 64,
    seed: int = 0,
) -> None:
    """Writes answers of a model to every prompt, as conversations ``{"messages", "asked"}``.

    Prompts that cannot be used, and answers that are empty or were cut by the length limit, are left out and counted.

    Args:
      speaker: the model.
      prompts: their records.
      output: where answers go; it may hold those of the first records.
      labels: attributes that an answer is conditioned on, each in its turn; "" for none.
      samples: answers to each prompt for each label.
      batch: prompts at a time.
      seed: of the random keys.

    Raises:
      RunFailure: not one answer can be used.
    """
    each = len(labels) * samples
    while not output.whole and output.done < len(prompts):
        chosen = range(output.done, min(output.done + batch, len(prompts)))
        counts: Counter[str] = Counter()
        asked: list[tuple[Prompt, str]] = []
        for outcome in speaker.reader.read([(i, prompts[i]) for i in chosen]):
            if outcome.prompt is None:
                counts[f"prompt {outcome.fault}"] += 1
                continue
            for label in labels:
                begun = speaker.begun(outcome.prompt, condition(label) if label else "")
                if speaker.fits(begun):
                    asked.append((begun, label))
                else:
                    counts["prompt overlong"] += 1
        wanted = [(prompt, label, i) for prompt, label in asked for i in range(samples)]
        ids = [prompt.index * each + labels.index(label) * samples + i for prompt, label, i in wanted]
        answers = speaker.answer([prompt for prompt, _, _ in wanted], ids, seed=seed)
        lines = []
        for (prompt, label, _), sample in zip(wanted, answers, strict=True):
            fault = fault_of(sample)
            counts[fault or "written"] += 1
            if not fault:
                lines.append(_line(prompt, label, sample))
        output.add(lines, len(chosen), counts)
    if not output.counts["written"]:
        why = ", ".join(f"{name}: {count}" for name, count in sorted(output.counts.items()))
        raise RunFailure(f"{output.path}: no answer can be used ({why}), so that nothing was written")
    output.finish()


def fault_of(sample: Sample) -> str:
    """Why an answer is nothing to learn from; "" if it can be used."""
    if sample.finish not in WHOLE:
        return "answer cut" if sample.finish == "length" else "answer invalid"
    return "" if sample.completion.strip() else "answer empty"


def _line(prompt: Prompt, label: str, sample: Sample) -> dict[str, Any]:
    more = {"asked": label} if label else {}
    if not prompt.messages:
        return {"prompt": prompt.text.removesuffix(condition(label)) if label else prompt.text} | {
            "completion": sample.completion,
            **more,
        }
    return {"messages": with_answer(prompt.messages, sample.completion), **more}


def with_answer(turns: Iterable[Turn], answer: str) -> list[Turn]:
    """A conversation with its answer; one that ends with the assistant's turn goes on with it."""
    before = list(turns)
    if before and before[-1]["role"] == "assistant":
        answer = before.pop()["content"] + answer
    return [*before, {"role": "assistant", "content": answer}]
