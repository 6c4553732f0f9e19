"""The data that ship with the configs: every record is read as prompt and as row, with the template beside them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.data.media_files import SETTINGS
from yatt_jax.data.config import DataConfig
from yatt_jax.data.documents import Encoder
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.families import build_processor, with_tokens
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.reader import PromptReader
from yatt_jax.data.records import open_table
from yatt_jax.data.tokenizer import character_tokenizer
from yatt_jax.types import TextRows

TEMPLATE = "configs/data/parts.jinja"


@pytest.mark.parametrize(
    ("name", "family", "count"),
    [
        ("vision_digits_train", "qwen2_5_vl", 1500),
        ("vision_digits_eval", "qwen2_5_vl", 297),
        ("audio_digits_tiny", "qwen2_audio", 20),
        ("audio_digits_tiny", "qwen2_5_omni", 20),
    ],
)
def test_every_record_is_read(name, family, count):
    table = open_table(f"configs/data/{name}.jsonl.gz")
    assert len(table) == count
    tokenizer = with_tokens(character_tokenizer("0123456789"), family)
    processor = build_processor(family, tokenizer, MediaConfig(), **SETTINGS[family])
    rows: Any = [(i, table[i]) for i in range(count)]
    reader = PromptReader(DataConfig(chat_template=TEMPLATE), tokenizer, processor)
    prompts = [outcome.prompt for outcome in reader.read(rows, keep=False)]
    answers = Counter(prompt.columns["completion"] for prompt in prompts if prompt)
    assert set(answers) == set("0123456789")
    assert min(answers.values()) > 0.8 * count / 10
    encoder = Encoder(OfflineConfig(chat_template=TEMPLATE), tokenizer, TextRows, media=processor)
    for prompt, outcome in zip(prompts, encoder.read(rows, keep=False), strict=True):
        assert prompt is not None
        assert outcome.row is not None, outcome.message
        (document,) = outcome.row.documents
        assert document.prompt.tolist() == prompt.tokens
        assert len(document.media) == len(prompt.media) == 1
        learned = tokenizer.decode(document.tokens[document.mask])
        assert learned == f"{prompt.columns['completion']}<eos>"
