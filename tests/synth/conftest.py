"""Tiny random models with a chat template, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from yatt_jax.config import InitConfig
from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.io.export import save_folder
from yatt_jax.models import families
from yatt_jax.models.build import Kind, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel.partition import Partition

ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789:,\n?.-"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save(folder: Path, kind: Kind, partition: Partition, **head: Any) -> Path:
    """A random model."""
    tokenizer = load_tokenizer(f"characters:{ALPHABET}")
    tokenizer.chat_template = TEMPLATE
    sizes = InitConfig(hidden=32, mlp=64)
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp")
    config = DecoderConfig(vocab=len(tokenizer), **{name: getattr(sizes, name) for name in names})
    model = build(kind, config, **head)
    written = families.to_hf("llama", config, 128) | {"eos_token_id": 0, "pad_token_id": None}
    save_folder(folder, model, model.init(5, partition), written, tokenizer, dtype="float32")
    return folder


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory, one_device: Partition) -> Path:
    """A language model."""
    return save(tmp_path_factory.mktemp("speaker") / "model", "lm", one_device)


@pytest.fixture(scope="session")
def attribute_model(tmp_path_factory: pytest.TempPathFactory, one_device: Partition) -> Path:
    """A regression reward model with nine outputs."""
    return save(tmp_path_factory.mktemp("attributes") / "model", "reward", one_device, labels=9)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Seven prompts, the last of them too long."""
    rows: list[Any] = [{"prompt": f"{a} {b}"} for a in "abc" for b in "de"] + [{"prompt": "a" * 200}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
