"""Shared by the data tests: tokenizers made of characters, with and without a chat template."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from yatt_jax.data.tokenizer import character_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:!?-\n"

# [u]TEXT<end>[a]TEXT<end>, with [s] for the system, and only alternating turns.
TEMPLATE = """
{%- if messages[0].role == 'system' %}{{ '[s]' + messages[0].content + '<end>' }}
{%- set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}
{%- for turn in turns %}
{%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
{{- '[' + turn.role[0] + ']' + turn.content + '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[a]' + (mark or '') }}{% endif %}"""


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, no chat template."""
    return character_tokenizer(ALPHABET)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, with a chat template that writes special tokens."""
    tokenizer = character_tokenizer(ALPHABET)
    for token in ("<end>", "[u]", "[a]", "[s]"):
        tokenizer.add_tokens(AddedToken(token, special=True, normalized=False))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes records to a file in the format its name says, and returns the path."""

    def to(name: str, records: Sequence[Any]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        if name.endswith(".jsonl"):
            path.write_text(lines)
        elif name.endswith(".jsonl.gz"):
            path.write_bytes(gzip.compress(lines.encode()))
        elif name.endswith(".json"):
            path.write_text(json.dumps(list(records)))
        elif name.endswith(".json.gz"):
            path.write_bytes(gzip.compress(json.dumps({"version": 1, "data": list(records)}).encode()))
        elif name.endswith(".parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(list(records)), path, row_group_size=2)
        else:
            raise ValueError(name)
        return str(path)

    return to
