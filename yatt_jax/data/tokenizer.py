"""Tokenizers: loading, chat templates, and which tokens end a response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from yatt_jax.data.config import DataError

_CHARACTERS = "characters:"


def load_tokenizer(spec: str) -> PreTrainedTokenizerFast:
    """Loads a tokenizer.

    Args:
      spec: a Hugging Face folder or hub name, a GGUF file, or ``"characters:ALPHABET"`` for a new tokenizer with a
        token for each character of ALPHABET, such as ``"characters:0123456789:"``.

    Returns:
      A tokenizer with a padding token. Where the model has none, its end token pads: padding is told by lengths and
      never by token ids.

    Raises:
      DataError: nothing there, or a folder without a tokenizer that can be read.
    """
    if spec.startswith(_CHARACTERS):
        return character_tokenizer(spec.removeprefix(_CHARACTERS))
    path = Path(spec).expanduser()
    if path.suffix.lower() == ".gguf":
        from yatt_jax.io.gguf import load_tokenizer as load_gguf

        tokenizer = load_gguf(path)
    else:
        if not path.is_dir() and (path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1):
            raise DataError(f"{spec}: no tokenizer there; expected a folder, a .gguf file or characters:ALPHABET")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else spec, use_fast=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().split("\n")[0]
            raise DataError(f"{spec}: the tokenizer cannot be loaded: {reason}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{spec}: only tokenizers with a tokenizer.json are read, and this one has none")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise DataError(f"{spec}: the tokenizer has neither a padding nor an end token; name one in its config")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters: ``<eos>`` is 0, and the alphabet follows in its order.

    The end token also pads, so that the vocabulary has no token that means nothing and still can be sampled.

    Raises:
      DataError: an empty alphabet, or a character given twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if not alphabet:
        raise DataError("characters: the alphabet is empty; write the characters after the colon")
    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if twice:
        raise DataError(f"characters:{alphabet}: {twice} are given twice")
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    # Without an unknown token, a character outside the alphabet is an error and not a silent hole.
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<eos>", eos_token="<eos>")


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    *,
    system: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
    source: str = "",
) -> str:
    """A conversation as the text a response continues, by the tokenizer's chat template.

    The template writes every special token itself, so the text is to be tokenized by ``encode``, which adds none.

    Args:
      tokenizer: with a chat template.
      messages: turns ``{"role", "content"}``. When the last one is the assistant's, the response continues it.
      system: put before conversations that do not begin with a system turn.
      template_kwargs: further variables of the template.
      source: "file:line", for messages.

    Raises:
      DataError: no chat template, or the template refuses the conversation.
    """
    turns = [dict(turn) for turn in messages]
    if system and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    where = f"{source}: " if source else ""
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}a conversation needs a chat template, and the tokenizer has none; "
            f"set data.chat_template to a jinja file, or give plain strings as prompts"
        )
    prefill = turns[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            **(template_kwargs or {}),
        )
    except Exception as error:  # a template can raise anything
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise DataError(f"{where}the chat template failed on turns ({roles}): {_reason(error)}") from error
    return str(text)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, no special token added; those written in a text are recognised."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def raw_prefix(tokenizer: PreTrainedTokenizerFast) -> str:
    """What goes before a text that no template wrote: the beginning token, if the model expects one, else nothing."""
    begin = tokenizer.bos_token
    if not begin:
        return ""
    return str(begin) if tokenizer("a", verbose=False)["input_ids"][0] == tokenizer.bos_token_id else ""


def stop_token_ids(
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Every token that ends a response, ascending.

    They are the end tokens of the model's ``generation_config.json`` (of ``config.json`` where that names none), the
    tokenizer's own, and the special token that the chat template writes after an assistant's turn.

    Args:
      tokenizer: the model's.
      folder: the model's folder; None where there is none.
      template_kwargs: further variables of the chat template.

    Raises:
      DataError: a damaged file in the folder.
    """
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name if folder is not None else None
        if not stops and file is not None and file.is_file():
            try:
                found = json.loads(file.read_text("utf-8")).get("eos_token_id")
            except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
                raise DataError(f"{file}: damaged: {error}") from error
            stops.update(found if isinstance(found, list) else [] if found is None else [found])
    if isinstance(tokenizer.eos_token_id, int):
        stops.add(tokenizer.eos_token_id)
    end_of_turn = _end_of_turn(tokenizer, template_kwargs or {})
    if end_of_turn is not None:
        stops.add(end_of_turn)
    return tuple(sorted(stops))


def _end_of_turn(tokenizer: PreTrainedTokenizerFast, template_kwargs: Mapping[str, Any]) -> int | None:
    """The special token right after an assistant's turn, by rendering one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "marked answer"}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, **template_kwargs))
    except Exception:  # a template that wants other turns tells nothing here
        return None
    _, found, rest = text.rpartition("marked answer")
    ids = encode(tokenizer, [rest.lstrip()])[0] if found else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return ids[0] if ids and ids[0] in special else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()
