"""From a prompt record, in any of its forms, to the conversation it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from yatt_jax.data.config import DataError
from yatt_jax.data.media.sources import KINDS, Source, is_media, parse_media
from yatt_jax.data.records import Record, json_type

Turn: TypeAlias = dict[str, Any]
Content: TypeAlias = str | list[dict[str, Any]]
_FORMS = '"prompt" (a string or a list of turns), "messages" (a list of turns) or "text" (a string)'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a prompt record says.

    Attributes:
      messages: turns ``{"role", "content"}``, see ``parse_turn``; empty for plain text.
      text: plain text; empty for turns.
      columns: every further column of the record.
      source: "file:line" of the record.
    """

    messages: list[Turn]
    text: str
    columns: dict[str, Any]
    source: str

    @property
    def media(self) -> list[Source]:
        """Where the images, audios and videos in it come from, in order."""
        return media_of(self.messages)


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
    turns = [parse_turn(turn, f"{where}, turn {i + 1}", record.folder) for i, turn in enumerate(value)]
    if name == "messages" and turns and turns[-1]["role"] == "assistant":
        answer = text_of(turns.pop()["content"])
        fields.setdefault("reference", answer)
    if not turns:
        raise DataError(f"{where}: no turn to respond to")
    return Conversation(turns, "", fields, record.source)


def parse_turn(turn: Any, where: str, folder: str = "") -> Turn:
    """A turn with its content as a string; fields that are null are left out.

    Where a content has media, it is a list of parts: ``{"type": "text", "text"}``, and ``{"type": KIND, KIND: Source}``
    with "image", "audio" or "video" for KIND.

    Args:
      turn: as read.
      where: the place in the record, that messages begin with.
      folder: what paths of media are relative to.

    Raises:
      DataError: no role, or a content that is neither text nor media.
    """
    if not isinstance(turn, dict):
        raise DataError(f'{where}: expected {{"role", "content"}}, found {json_type(turn)}')
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f'{where}: expected a name under "role", found {json_type(role)} (fields: {sorted(turn)})')
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        content = ""
    return {key: value for key, value in turn.items() if value is not None} | {
        "content": _content(content, where, folder)
    }


def text_of(content: Content) -> str:
    """The text of a content, without its media."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def media_of(messages: Sequence[Turn]) -> list[Source]:
    """Where the media in turns come from, in order."""
    parts = [part for turn in messages if not isinstance(turn["content"], str) for part in turn["content"]]
    return [part[part["type"]] for part in parts if part["type"] in KINDS]


def _content(content: Any, where: str, folder: str) -> Content:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f'{where}: expected a string or a list of parts under "content", found {json_type(content)}')
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if is_media(part):
            source = parse_media(part, folder, f"{where}, part {i + 1}")
            parts.append({"type": source.kind, source.kind: source})
            continue
        if kind != "text":
            found = f'a part of type "{kind}"' if kind else json_type(part)
            raise DataError(
                f'{where}, part {i + 1}: found {found}; expected {{"type": "text", "text"}}, an image, audio or video'
            )
        if not isinstance(part.get("text"), str):
            raise DataError(
                f'{where}, part {i + 1}: expected a string under "text", found {json_type(part.get("text"))}'
            )
        parts.append({"type": "text", "text": part["text"]})
    only_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if only_text else parts
