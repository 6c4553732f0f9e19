"""From a prompt record, in any of its forms, to the conversation it holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from yatt_jax.data.config import DataError
from yatt_jax.data.records import Record, json_type

Turn = dict[str, Any]
_FORMS = '"prompt" (a string or a list of turns), "messages" (a list of turns) or "text" (a string)'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a prompt record says.

    Attributes:
      messages: turns ``{"role", "content"}`` with string contents; empty for plain text.
      text: plain text; empty for turns.
      columns: every further column of the record.
      source: "file:line" of the record.
    """

    messages: list[Turn]
    text: str
    columns: dict[str, Any]
    source: str


def parse_prompt(record: Record, *, wrap: bool) -> Conversation:
    """Reads a prompt record.

    The first of the fields ``prompt``, ``messages`` and ``text`` that is there (and not null) holds the prompt; all
    others are columns.

    * ``{"prompt": str}`` is one user turn if ``wrap``, else plain text. ``{"text": str}`` is always plain text.
    * ``{"prompt": [...]}`` is a conversation. When its last turn is the assistant's, the response continues that turn.
    * ``{"messages": [...]}`` is a conversation as fine-tuning data holds it: a last turn by the assistant is its
      answer, and goes to the column ``reference`` (unless the record has one).

    Args:
      record: as read.
      wrap: whether a plain string under ``prompt`` becomes a user turn.

    Raises:
      DataError: no usable field or a wrong type; the message gives file, line and field.
    """
    fields = {key: value for key, value in record.fields.items() if value is not None}
    name = next((n for n in ("prompt", "messages", "text") if n in fields), None)
    if name is None:
        raise DataError(f"{record.source}: no prompt among the fields {sorted(fields)}; expected {_FORMS}")
    value = fields.pop(name)
    where = f'{record.source}: field "{name}"'
    if isinstance(value, str) and name != "messages":
        if not value:
            raise DataError(f"{where} is empty")
        if name == "prompt" and wrap:
            return Conversation([{"role": "user", "content": value}], "", fields, record.source)
        return Conversation([], value, fields, record.source)
    if not isinstance(value, list) or name == "text":
        expected = {"prompt": "a string or a list of turns", "messages": "a list of turns", "text": "a string"}[name]
        raise DataError(f"{where}: expected {expected}, found {json_type(value)}")
    turns = [parse_turn(turn, f"{where}, turn {i + 1}") for i, turn in enumerate(value)]
    if name == "messages" and turns and turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]
        fields.setdefault("reference", answer)
    if not turns:
        raise DataError(f"{where}: no turn to respond to")
    return Conversation(turns, "", fields, record.source)


def parse_turn(turn: Any, where: str) -> Turn:
    """A turn with its content as a string; fields that are null are left out.

    Raises:
      DataError: no role, or a content that is not text; the message begins with ``where``.
    """
    if not isinstance(turn, dict):
        raise DataError(f'{where}: expected {{"role", "content"}}, found {json_type(turn)}')
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f'{where}: expected a name under "role", found {json_type(role)} (fields: {sorted(turn)})')
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        content = ""
    return {key: value for key, value in turn.items() if value is not None} | {"content": _content(content, where)}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f'{where}: expected a string or a list of parts under "content", found {json_type(content)}')
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            found = f'a part of type "{kind}"' if kind else json_type(part)
            raise DataError(
                f'{where}, part {i + 1}: found {found}; only {{"type": "text", "text"}} parts are supported'
            )
        if not isinstance(part.get("text"), str):
            raise DataError(
                f'{where}, part {i + 1}: expected a string under "text", found {json_type(part.get("text"))}'
            )
        texts.append(part["text"])
    return "".join(texts)
