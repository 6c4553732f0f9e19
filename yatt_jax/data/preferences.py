"""Records that say which answers are better: pairs, adjacent lines, single judgements, ratings and rated steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yatt_jax.data.attributes import MISSING, parse_label, rating_vector
from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import Turn
from yatt_jax.data.dialogues import (
    answer_turns,
    answered,
    field,
    number_field,
    prompt_turns,
    speaker_turns,
    text_field,
    turn_labels,
    turns_field,
)
from yatt_jax.data.examples import Chat, Pair, Plain, Rated, Reading, Steps, Text, Unpaired
from yatt_jax.data.records import Record, json_type

_STRONGEST = 3


def preference(record: Record, how: Reading) -> Pair:
    """``{"prompt", "chosen", "rejected"}``: strings or turns. Answers that are whole conversations are split."""
    if all(_begins_conversation(record.fields[name]) for name in ("chosen", "rejected")):
        return whole_conversations(record, how)
    return _pair(record, "chosen", "rejected", how.wrap)


def responses(record: Record, how: Reading) -> Pair:
    """``{"prompt", "chosen_response", "rejected_response"}``, with rewards where it has them."""
    return _pair(record, "chosen_response", "rejected_response", how.wrap)


def whole_conversations(record: Record, how: Reading) -> Pair:
    """``{"chosen", "rejected"}``: full conversations (turns, or text), split where they begin to differ."""
    values = [record.fields.get(name) for name in ("chosen", "rejected")]
    if all(isinstance(value, str) for value in values):
        chosen, rejected = split_texts(text_field(record, "chosen"), text_field(record, "rejected"), record)
        return Pair(chosen, rejected, _gap(record))
    better, worse = turns_field(record, "chosen"), turns_field(record, "rejected")
    same = _common(better, worse)
    for name, turns in (("chosen", better), ("rejected", worse)):
        if same == len(turns):
            other = "rejected" if name == "chosen" else "chosen"
            raise DataError(f'{field(record, name)}: nothing in it differs from "{other}", which begins with all of it')
    return Pair(
        answer_turns(record, "chosen", better[:same], better[same:]),
        answer_turns(record, "rejected", worse[:same], worse[same:]),
        _gap(record),
    )


def lines(first: Record, second: Record, how: Reading) -> Pair:
    """Two adjacent ``{"text"}``: the first is chosen."""
    chosen, rejected = split_texts(text_field(first, "text"), text_field(second, "text"), first)
    return Pair(chosen, rejected)


def strength(first: Record, second: Record, how: Reading) -> Pair:
    """Two adjacent ``{"text", "label"}``: ``label[0]``, the same in both, is -3..3; below 0 the first is preferred."""
    values = [_strength(record) for record in (first, second)]
    if values[0] != values[1]:
        raise DataError(
            f"{field(second, 'label')}: {values[1]:g}, and {first.source} has {values[0]:g}; both rows of a pair hold "
            f"the same strength (is a line missing before them?)"
        )
    one, other = split_texts(text_field(first, "text"), text_field(second, "text"), first)
    chosen, rejected = (one, other) if values[0] <= 0 else (other, one)
    return Pair(chosen, rejected, abs(values[0]), tie=values[0] == 0)


def split_texts(one: str, other: str, record: Record) -> tuple[Plain, Plain]:
    """Two texts as a common prompt and two answers.

    The prompt ends before the word where they begin to differ, so that no word is torn apart; the space before that
    word belongs to the answers.

    Raises:
      DataError: they are equal.
    """
    if one == other:
        raise DataError(
            f"{record.source}: the two texts are equal, so that neither can be preferred; remove the record"
        )
    same = _common(one, other)
    start = same
    while start and not one[start - 1].isspace():
        start -= 1
    # The blanks before the word go with it; without any, the texts are split where they differ.
    while start and one[start - 1].isspace():
        start -= 1
    start = start or same
    return Plain(one[:start], one[start:], record.source), Plain(other[:start], other[start:], record.source)


def by_preference(record: Record, how: Reading) -> Unpaired:
    """``{"prompt", "response", "preference"}``: "chosen" or "rejected"."""
    value = record.fields["preference"]
    if value not in ("chosen", "rejected"):
        found = repr(value) if isinstance(value, str) else json_type(value)
        raise DataError(f'{field(record, "preference")}: expected "chosen" or "rejected", found {found}')
    return Unpaired(answered(record, "prompt", "response", wrap=how.wrap), value == "chosen")


def by_label(record: Record, how: Reading) -> Unpaired:
    """``{"prompt", "completion", "label"}``: true for a wanted completion."""
    value = record.fields["label"]
    if not isinstance(value, bool):
        raise DataError(f"{field(record, 'label')}: expected true or false, found {json_type(value)}")
    return Unpaired(answered(record, "prompt", "completion", wrap=how.wrap), value)


def regression(record: Record, how: Reading) -> Rated:
    """``{"text", "label": [...]}``: one number for each attribute, -100 where it is not rated."""
    ratings = _numbers(record, "label")
    if all(rating == MISSING for rating in ratings):
        raise DataError(f"{field(record, 'label')}: every attribute is {MISSING:g}, so that nothing can be learned")
    return Rated(Plain("", text_field(record, "text"), record.source), ratings)


def labelled_turns(record: Record, how: Reading) -> Rated:
    """Chat records whose turns have labels such as "quality:4,humor:0": the last labelled turn is rated."""
    turns, _ = speaker_turns(record)
    labels = turn_labels(record)
    rated = [i for i, label in enumerate(labels) if label]
    if not rated:
        raise DataError(f'{field(record, "conversations")}: no turn has a "label" such as "quality:4,humor:0"')
    last = rated[-1]
    where = f"{field(record, 'conversations')}, turn {last + 1 - bool(record.fields.get('system'))}, label"
    ratings = rating_vector(parse_label(labels[last], where), where)
    return Rated(Chat(turns[: last + 1], [False] * (last + 1), record.source), ratings)


def rated_steps(record: Record, how: Reading) -> Steps:
    """``{"prompt", "completions": [...], "labels": [...]}``: steps of an answer, each right or wrong (or a number)."""
    steps = record.fields["completions"]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{field(record, 'completions')}: expected a list of steps, found {json_type(steps)}")
    for i, step in enumerate(steps):
        if not isinstance(step, str) or not step:
            raise DataError(f"{field(record, 'completions')}, step {i + 1}: expected a text, found {json_type(step)}")
    ratings = _numbers(record, "labels", truth=True)
    if len(ratings) != len(steps):
        raise DataError(f"{field(record, 'labels')}: {len(ratings)} labels for {len(steps)} steps")
    if not all(rating == MISSING or 0 <= rating <= 1 for rating in ratings):
        raise DataError(f"{field(record, 'labels')}: from 0 (wrong) to 1 (right), or {MISSING:g}; found {ratings}")
    if all(rating == MISSING for rating in ratings):
        raise DataError(f"{field(record, 'labels')}: every step is {MISSING:g}, so that nothing can be learned")
    answer = how.step_separator.join(steps)
    ends = [len(how.step_separator.join(steps[: i + 1])) for i in range(len(steps))]
    if isinstance(record.fields["prompt"], str) and not how.wrap:
        text: Text = Plain(text_field(record, "prompt"), answer, record.source)
    else:
        turn: Turn = {"role": "assistant", "content": answer}
        text = answer_turns(record, "completions", prompt_turns(record, "prompt"), [turn])
    return Steps(text, tuple(ends), ratings)


def _pair(record: Record, chosen: str, rejected: str, wrap: bool) -> Pair:
    better, worse = (answered(record, "prompt", name, wrap=wrap) for name in (chosen, rejected))
    if record.fields[chosen] == record.fields[rejected]:
        raise DataError(
            f'{field(record, rejected)}: equal to "{chosen}", so that neither is preferred; remove the record'
        )
    return Pair(better, worse, _gap(record))


def _gap(record: Record) -> float | None:
    """The ground-truth difference of a pair: of its rewards, or its ``margin``."""
    rewards = ("chosen_reward", "rejected_reward")
    given = [name for name in rewards if name in record.fields]
    if len(given) == 1:
        (lacking,) = set(rewards) - set(given)
        raise DataError(f'{field(record, given[0])}: there, but "{lacking}" is not; give both or neither')
    if given:
        gap, name = number_field(record, rewards[0]) - number_field(record, rewards[1]), rewards[0]
    elif "margin" in record.fields:
        gap, name = number_field(record, "margin"), "margin"
    else:
        return None
    if gap < 0:
        raise DataError(f"{field(record, name)}: says that the rejected answer is better by {-gap:g}; exchange the two")
    return gap


def _strength(record: Record) -> float:
    value = _numbers(record, "label")[0]
    if value != int(value) or abs(value) > _STRONGEST:
        raise DataError(
            f"{field(record, 'label')}: a strength is a whole number from -{_STRONGEST} to {_STRONGEST}, "
            f"found {value:g}"
        )
    return value


def _numbers(record: Record, name: str, *, truth: bool = False) -> tuple[float, ...]:
    """A list of numbers, of which there is at least one; also of truth values, where they are allowed."""
    values = record.fields.get(name)
    if not isinstance(values, list) or not values:
        found = "an empty list" if values == [] else json_type(values)
        raise DataError(f"{field(record, name)}: expected a list of numbers, found {found}")
    for i, value in enumerate(values):
        number = isinstance(value, int | float) and (truth or not isinstance(value, bool))
        if not number or not abs(value) < float("inf"):
            found = value if isinstance(value, float) else json_type(value)
            raise DataError(f"{field(record, name)}, number {i + 1}: expected a finite number, found {found}")
    return tuple(float(value) for value in values)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _begins_conversation(value: Any) -> bool:
    """Whether an answer is in fact a whole conversation: turns that do not begin with the assistant's."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") in ("system", "developer", "user")
