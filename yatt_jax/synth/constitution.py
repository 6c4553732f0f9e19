"""Preferences that a model forms by itself from a list of principles (Bai et al. 2022, "Constitutional AI").

By revision: the model answers, criticises its answer in the light of a principle, and writes it anew; the revision is
preferred to the first answer. By choice: it answers twice, and says which answer a principle prefers; it is asked in
both orders, and counts only where it chooses the same answer both times.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import Turn
from yatt_jax.data.dialogues import text_field
from yatt_jax.data.records import Record, Table, open_table
from yatt_jax.errors import RunFailure
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.synth.output import Output
from yatt_jax.synth.respond import fault_of, with_answer
from yatt_jax.synth.speaker import Speaker
from yatt_jax.types import Prompt, Sample

Pairs: TypeAlias = Literal["revision", "choice"]
Form: TypeAlias = Literal["preferences", "answers"]
FIELDS: dict[Pairs, tuple[str, ...]] = {"revision": ("critique", "revision"), "choice": ("choice",)}

_QUESTION = """Here are a request and two answers to it.

Request:
{request}

Answer A:
{a}

Answer B:
{b}

{principle} Reply with the letter A or B and nothing else."""
_VERDICT = re.compile(r"[^A-Za-z]*(?:(?:[Aa]nswer|[Oo]ption)\W+)?([AB])(?![A-Za-z]|\s+[a-z])")


@dataclasses.dataclass(frozen=True)
class Principle:
    """What the model is told; texts that a kind of pairs does not use may be empty.

    Attributes:
      critique: asks for a critique of the answer before.
      revision: asks for the answer to be written anew.
      choice: asks which of two answers is to be preferred.
    """

    critique: str = ""
    revision: str = ""
    choice: str = ""


def read_principles(path: str | Path, pairs: Pairs) -> list[Principle]:
    """Principles of a file, one a record, ``{"critique", "revision", "choice"}``.

    Args:
      path: of the file.
      pairs: what they are for: a principle must have the texts that this needs.

    Raises:
      DataError: a record that lacks one of them, or files that cannot be read.
    """
    table = open_table(str(path))
    return [_principle(table[i], pairs) for i in range(len(table))]


def _principle(record: Record, pairs: Pairs) -> Principle:
    known = {field.name for field in dataclasses.fields(Principle)}
    texts = {name: text_field(record, name) for name in known if name in record.fields or name in FIELDS[pairs]}
    return Principle(**texts)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A prompt on its way to a preference.

    Attributes:
      prompt: what is answered.
      first: the first answer.
      answer: the one that it is compared with: the latest revision, or the second answer.
      critique: of the last round.
      principle: number of the last principle.
    """

    prompt: Prompt
    first: str
    answer: str
    critique: str = ""
    principle: int = -1


class Constitution:
    """Makes preferences of prompts.

    Args:
      speaker: the model.
      principles: from ``read_principles``.
      pairs: how they are made.
      form: "preferences" as ``{"prompt", "chosen", "rejected"}``, or "answers" as conversations with what is preferred.
      rounds: critiques and revisions of an answer, each by another principle.
      seed: of the random keys, and of the choice of principles.
    """

    def __init__(
        self,
        speaker: Speaker,
        principles: Sequence[Principle],
        *,
        pairs: Pairs = "revision",
        form: Form = "preferences",
        rounds: int = 1,
        seed: int = 0,
    ) -> None:
        self._speaker, self._principles = speaker, principles
        self._pairs, self._form, self._rounds, self._seed = pairs, form, rounds, seed
        self._verdict = dataclasses.replace(
            speaker.sampling, temperature=0.0, max_new_tokens=min(8, speaker.sampling.max_new_tokens)
        )
        # Samples of a prompt: answers, then critiques and revisions, or both orders of the question.
        self._samples = 1 + 2 * rounds if pairs == "revision" else 4
        self._counts: Counter[str] = Counter()

    def write(self, prompts: Table, output: Output, batch: int = 64) -> None:
        """Writes a line for each prompt that leads to a preference; the others are counted.

        Args:
          prompts: records of prompts.
          output: where they go; it may hold those of the first records.
          batch: prompts at a time.

        Raises:
          DataError: a prompt that is no conversation.
          RunFailure: not one preference came about.
        """
        while not output.whole and output.done < len(prompts):
            chosen = range(output.done, min(output.done + batch, len(prompts)))
            self._counts = Counter()
            asked = self._read(prompts, chosen)
            drafts = self._revised(asked) if self._pairs == "revision" else self._compared(asked)
            lines = [self._line(draft) for draft in drafts if self._differs(draft)]
            self._counts["written"] += len(lines)
            output.add(lines, len(chosen), self._counts)
        if not output.counts["written"]:
            why = ", ".join(f"{name}: {count}" for name, count in sorted(output.counts.items()) if count)
            raise RunFailure(f"{output.path}: not one preference came about ({why}), so that nothing was written")
        output.finish()

    def _read(self, prompts: Table, chosen: Iterable[int]) -> list[Prompt]:
        found = []
        for outcome in self._speaker.reader.read([(i, prompts[i]) for i in chosen]):
            if outcome.prompt is None:
                self._counts[f"prompt {outcome.fault}"] += 1
            elif not outcome.prompt.messages:
                raise DataError(
                    f"{outcome.prompt.source}: plain text; critiques need conversations, and a model with a chat "
                    "template"
                )
            elif outcome.prompt.messages[-1]["role"] == "assistant":
                self._counts["prompt with a begun answer"] += 1
            else:
                found.append(outcome.prompt)
        return found

    def _revised(self, prompts: Sequence[Prompt]) -> list[Draft]:
        drafts = [Draft(prompt, text, text) for prompt, text in self._ask([(p, p) for p in prompts], 0, "answer")]
        for number in range(self._rounds):
            drafts = [dataclasses.replace(draft, principle=self._choose(draft.prompt, number)) for draft in drafts]
            wanted = [(draft, self._prompt(draft, self._critique_turns(draft))) for draft in drafts]
            drafts = [
                dataclasses.replace(draft, critique=text)
                for draft, text in self._ask(wanted, 1 + 2 * number, "critique")
            ]
            wanted = [(draft, self._prompt(draft, self._revision_turns(draft))) for draft in drafts]
            drafts = [
                dataclasses.replace(draft, answer=text) for draft, text in self._ask(wanted, 2 + 2 * number, "revision")
            ]
        return drafts

    def _compared(self, prompts: Sequence[Prompt]) -> list[Draft]:
        firsts = self._ask([(prompt, prompt) for prompt in prompts], 0, "answer")
        wanted = [(Draft(prompt, text, ""), prompt) for prompt, text in firsts]
        drafts = [
            dataclasses.replace(draft, answer=text, principle=self._choose(draft.prompt, 0))
            for draft, text in self._ask(wanted, 1, "answer")
        ]
        drafts = [draft for draft in drafts if self._differs(draft)]
        said: dict[int, list[str]] = {}
        for turn, (a, b) in enumerate((("first", "answer"), ("answer", "first"))):
            questions = [(draft, self._prompt(draft, [self._question(draft, a, b)])) for draft in drafts]
            for draft, text in self._ask(questions, 2 + turn, "verdict", self._verdict):
                verdict = read_verdict(text)
                said.setdefault(draft.prompt.index, []).append({"A": a, "B": b}.get(verdict, ""))
        return [judged for draft in drafts if (judged := self._decided(draft, said.get(draft.prompt.index, [])))]

    def _decided(self, draft: Draft, said: Sequence[str]) -> Draft | None:
        """The draft with the preferred answer as its ``answer``; None where there is none."""
        if len(said) < 2 or not all(said):
            self._counts["verdict malformed"] += len(said) == 2
            return None
        if said[0] != said[1]:
            self._counts["verdict by order"] += 1
            return None
        swapped = dataclasses.replace(draft, first=draft.answer, answer=draft.first)
        return draft if said[0] == "answer" else swapped

    def _ask(
        self, wanted: Sequence[tuple[Any, Prompt]], number: int, what: str, sampling: Sampling | None = None
    ) -> list[tuple[Any, str]]:
        """What the model says, of each that it says something usable of.

        Args:
          wanted: whatever is asked for, with its prompt.
          number: of the sample among those of a prompt.
          what: is asked for, to count what fails.
          sampling: in place of the speaker's.
        """
        fitting = [(of, prompt) for of, prompt in wanted if self._speaker.fits(prompt)]
        self._counts[f"{what} overlong"] += len(wanted) - len(fitting)
        ids = [prompt.index * self._samples + number for _, prompt in fitting]
        samples = self._speaker.answer([prompt for _, prompt in fitting], ids, seed=self._seed, sampling=sampling)
        found = []
        for (of, _), sample in zip(fitting, samples, strict=True):
            fault = _fault(sample, short=what == "verdict")
            if fault:
                self._counts[fault.replace("answer", what)] += 1
            else:
                found.append((of, sample.completion.strip()))
        return found

    def _choose(self, prompt: Prompt, number: int) -> int:
        """The principle of a round: another one in each, as far as there are others."""
        order = list(range(len(self._principles)))
        random.Random(f"{self._seed} {prompt.index}").shuffle(order)
        return order[number % len(order)]

    def _prompt(self, draft: Draft, turns: Sequence[Turn]) -> Prompt:
        return self._speaker.ask(turns, source=draft.prompt.source, index=draft.prompt.index)

    def _critique_turns(self, draft: Draft) -> list[Turn]:
        said = self._principles[draft.principle].critique
        return [*with_answer(draft.prompt.messages, draft.answer), {"role": "user", "content": said}]

    def _revision_turns(self, draft: Draft) -> list[Turn]:
        said = self._principles[draft.principle].revision
        critique: Turn = {"role": "assistant", "content": draft.critique}
        return [*self._critique_turns(draft), critique, {"role": "user", "content": said}]

    def _question(self, draft: Draft, a: str, b: str) -> Turn:
        turns = draft.prompt.messages
        users = [turn for turn in turns if turn["role"] != "system"]
        request = users[0]["content"] if len(users) == 1 else "\n".join(f"{t['role']}: {t['content']}" for t in users)
        principle = self._principles[draft.principle].choice
        asked = _QUESTION.format(request=request, a=getattr(draft, a), b=getattr(draft, b), principle=principle)
        return {"role": "user", "content": asked}

    def _differs(self, draft: Draft) -> bool:
        same = draft.first == draft.answer
        self._counts["same answers"] += same
        return not same

    def _line(self, draft: Draft) -> dict[str, Any]:
        principle = {"principle": draft.principle} | ({"critique": draft.critique} if draft.critique else {})
        if self._form == "answers":
            return {"messages": with_answer(draft.prompt.messages, draft.answer), **principle}
        return {"prompt": draft.prompt.messages, "chosen": draft.answer, "rejected": draft.first, **principle}


def read_verdict(text: str) -> str:
    """The letter that a reply begins with, "A" or "B"; "" where it begins with neither."""
    match = _VERDICT.match(text)
    return match[1] if match else ""


def _fault(sample: Sample, *, short: bool) -> str:
    """As ``fault_of``; a short reply may have been cut."""
    fault = fault_of(sample)
    return "" if short and fault == "answer cut" else fault
