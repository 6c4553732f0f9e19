"""Records that hold a conversation or a text: the formats of fine-tuning, and the parts that other formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from yatt_jax.data.config import DataError
from yatt_jax.data.conversation import Turn, media_of, parse_turn
from yatt_jax.data.examples import Chat, Plain, Reading, Text
from yatt_jax.data.records import Record, json_type

# Who speaks in a turn, by the names in use.
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bard", "bing", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
_CONDITIONED = "VALUE_TO_TEXT"


def field(record: Record, name: str) -> str:
    """How messages name a field of a record."""
    return f'{record.source}: field "{name}"'


def text_field(record: Record, name: str) -> str:
    """A string that is not empty.

    Raises:
      DataError: another type, or an empty string.
    """
    value = record.fields.get(name)
    if not isinstance(value, str):
        raise DataError(f"{field(record, name)}: expected a string, found {json_type(value)}")
    if not value:
        raise DataError(f"{field(record, name)} is empty; remove the record, or give it a text")
    return value


def number_field(record: Record, name: str) -> float:
    """A finite number.

    Raises:
      DataError: another type, NaN or infinity.
    """
    value = record.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{field(record, name)}: expected a number, found {json_type(value)}")
    if not abs(value) < float("inf"):
        raise DataError(f"{field(record, name)}: expected a finite number, found {value}")
    return float(value)


def turns_field(record: Record, name: str) -> list[Turn]:
    """A list of ``{"role", "content"}`` turns that is not empty.

    Raises:
      DataError: another type, no turn, or one that does not fit.
    """
    value = record.fields.get(name)
    if not isinstance(value, list):
        raise DataError(f"{field(record, name)}: expected a list of turns, found {json_type(value)}")
    if not value:
        raise DataError(f"{field(record, name)}: holds no turn")
    return [parse_turn(turn, f"{field(record, name)}, turn {i + 1}", record.folder) for i, turn in enumerate(value)]


def answered(record: Record, prompt: str, answer: str, *, wrap: bool) -> Text:
    """The text made of a prompt and its answer, each a string or a list of turns.

    Args:
      record: as read.
      prompt: name of the field that holds the prompt.
      answer: name of the field that holds the answer.
      wrap: whether two strings become a user's and an assistant's turn.

    Raises:
      DataError: a wrong type, something empty, or an answer without a turn of the assistant's.
    """
    kinds = [type(record.fields.get(name)) for name in (prompt, answer)]
    for name, kind in zip((prompt, answer), kinds, strict=True):
        if kind not in (str, list):
            found = json_type(record.fields.get(name))
            raise DataError(f"{field(record, name)}: expected a string or a list of turns, found {found}")
    if kinds == [str, str] and not wrap:
        return Plain(text_field(record, prompt), text_field(record, answer), record.source)
    before = prompt_turns(record, prompt)
    if kinds[1] is str:
        after: list[Turn] = [{"role": "assistant", "content": text_field(record, answer)}]
    else:
        after = turns_field(record, answer)
    if before[-1]["role"] == "assistant" and after[0]["role"] == "assistant":
        raise DataError(
            f'{field(record, prompt)}: ends with a turn of the assistant\'s, and "{answer}" begins with one; '
            f"join the two turns, and put the text in the answer"
        )
    return answer_turns(record, answer, before, after)


def prompt_turns(record: Record, name: str) -> list[Turn]:
    """A prompt as turns: a string is one of the user's."""
    if isinstance(record.fields.get(name), str):
        return [{"role": "user", "content": text_field(record, name)}]
    return turns_field(record, name)


def answer_turns(record: Record, name: str, before: Sequence[Turn], after: Sequence[Turn]) -> Chat:
    """A conversation of which the assistant's turns in ``after`` are learned.

    Raises:
      DataError: it has none.
    """
    learn = [False] * len(before) + [turn["role"] == "assistant" for turn in after]
    if not any(learn):
        roles = ", ".join(turn["role"] for turn in after) or "none"
        raise DataError(f"{field(record, name)}: no turn of the assistant's to learn (roles: {roles})")
    for turn, learned in zip([*before, *after], learn, strict=True):
        if learned and (media := media_of([turn])):
            raise DataError(f"{media[0].where}: {_a(media[0].kind)} in an answer, which models of text cannot learn")
    return Chat([*before, *after], learn, record.source)


def _a(kind: str) -> str:
    return f"{'a' if kind == 'video' else 'an'} {kind}"


def messages(record: Record, how: Reading) -> Chat:
    """``{"messages": [{"role", "content"}, ...]}``: every turn of the assistant's is learned."""
    return answer_turns(record, "messages", [], turns_field(record, "messages"))


def prompt_completion(record: Record, how: Reading) -> Text:
    """``{"prompt", "completion"}``, strings or turns: the completion is learned."""
    return answered(record, "prompt", "completion", wrap=how.wrap)


def input_output(record: Record, how: Reading) -> Text:
    """``{"input", "output"}``, strings or turns: the output is learned."""
    return answered(record, "input", "output", wrap=how.wrap)


def plain_text(record: Record, how: Reading) -> Plain:
    """``{"text"}``: all of it is learned, and no template is applied."""
    return Plain("", text_field(record, "text"), record.source)


def conversations(record: Record, how: Reading) -> Chat:
    """``{"conversations": [{"from", "value"}, ...]}``, with ``system`` where there is one.

    Without ``mask`` the names of the speakers say who is who (ShareGPT). With ``mask``, the name of a speaker, all
    turns but that speaker's are learned (NeMo). With ``"type": "VALUE_TO_TEXT"``, the ``label`` of a turn that is
    learned is what its text is conditioned on; without, labels are for predicting them and are left out here.
    """
    turns, names = speaker_turns(record)
    mask = record.fields.get("mask")
    if mask is not None and not isinstance(mask, str):
        raise DataError(f"{field(record, 'mask')}: expected the name of a speaker, found {json_type(mask)}")
    if mask is None:
        learn = [turn["role"] == "assistant" for turn in turns]
    else:
        learn = [name != mask and name is not None for name in names]
        if mask not in names:
            raise DataError(
                f"{field(record, 'mask')}: no turn is from {mask!r}; speakers: {sorted(filter(None, names))}"
            )
    if not any(learn):
        raise DataError(
            f"{field(record, 'conversations')}: no turn to learn (speakers: {', '.join(filter(None, names))})"
        )
    kind = record.fields.get("type")
    if kind not in (None, _CONDITIONED):
        raise DataError(
            f'{field(record, "type")}: {kind!r} is not read; leave it out, or write "{_CONDITIONED}" to condition '
            f"turns on their labels (to predict labels, train a regression reward model)"
        )
    labels = [label if kind and learned else "" for label, learned in zip(turn_labels(record), learn, strict=True)]
    return Chat(turns, learn, record.source, labels if any(labels) else [])


def speaker_turns(record: Record) -> tuple[list[Turn], list[str | None]]:
    """The turns of ``conversations``, and who speaks in each; a turn made of the record's ``system`` has no speaker.

    Raises:
      DataError: a wrong type, no turn, or a name that tells no role.
    """
    name = "conversations"
    value, mask = record.fields.get(name), record.fields.get("mask")
    if not isinstance(value, list):
        raise DataError(f"{field(record, name)}: expected a list of turns, found {json_type(value)}")
    if not value:
        raise DataError(f"{field(record, name)}: holds no turn")
    turns: list[Turn] = []
    names: list[str | None] = []
    system = record.fields.get("system")
    if system is not None and not isinstance(system, str):
        raise DataError(f"{field(record, 'system')}: expected a string, found {json_type(system)}")
    if system:
        turns.append({"role": "system", "content": system})
        names.append(None)
    for i, turn in enumerate(value):
        where = f"{field(record, name)}, turn {i + 1}"
        if not isinstance(turn, dict):
            raise DataError(f'{where}: expected {{"from", "value"}}, found {json_type(turn)}')
        for key in ("from", "value"):
            if not isinstance(turn.get(key), str):
                raise DataError(f'{where}: expected a string under "{key}", found {json_type(turn.get(key))}')
        turns.append({"role": _role(turn["from"], mask, where), "content": turn["value"]})
        names.append(turn["from"])
    return turns, names


def turn_labels(record: Record) -> list[str]:
    """The label of each turn of ``speaker_turns``, "" where there is none.

    Raises:
      DataError: a label that is not a string.
    """
    labels = [""] if record.fields.get("system") else []
    for i, turn in enumerate(record.fields["conversations"]):
        label = turn.get("label")
        if label is not None and not isinstance(label, str):
            where = f"{field(record, 'conversations')}, turn {i + 1}"
            raise DataError(f'{where}: expected a string such as "quality:4" under "label", found {json_type(label)}')
        labels.append(label or "")
    return labels


def _role(name: str, mask: Any, where: str) -> str:
    role = _ROLES.get(name.lower())
    if role is None and isinstance(mask, str):
        # With a mask any two names will do: who is masked asks, and the other answers.
        return "user" if name == mask else "assistant"
    if role is None:
        raise DataError(f'{where}: the speaker {name!r} under "from" tells no role; known: {", ".join(sorted(_ROLES))}')
    return role
