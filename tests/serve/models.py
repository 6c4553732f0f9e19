"""Tiny models as folders: what servers are tested with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from yatt_jax.data.tokenizer import load_tokenizer
from yatt_jax.io.export import save_folder
from yatt_jax.models import families
from yatt_jax.models.build import Kind, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel.partition import Split, make_partitions

ALPHABET = "characters:0123456789 "


def write(folder: Path, kind: Kind, seed: int = 3, layers: int = 2, hidden: int = 32, **head: Any) -> Path:
    """A model of a kind, with weights from a seed, as a folder with its tokenizer."""
    tokenizer = load_tokenizer(ALPHABET)
    config = DecoderConfig(
        vocab=len(tokenizer), hidden=hidden, layers=layers, heads=4, kv_heads=2, head_dim=hidden // 4, mlp=2 * hidden
    )
    values = families.to_hf("llama", config, 512)
    values |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = build(kind, dataclasses.replace(config), "float32", **head)
    partition, _ = make_partitions(Split(), Split(), jax.devices()[:1])
    params = model.init(seed, partition)
    if kind == "value":  # a fresh critic says 0 of everything
        kernel = params["head"]["kernel"]
        params["head"]["kernel"] = jax.random.normal(jax.random.key(seed), kernel.shape, kernel.dtype)
    return save_folder(folder, model, params, values, tokenizer, dtype="float32")
