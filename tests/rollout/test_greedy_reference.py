"""Greedy responses are those of transformers' generate, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from yatt_jax.io.hf import load_model
from yatt_jax.parallel.partition import Partition
from yatt_jax.rollout.engine import Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Prompt

VOCAB, NEW = 97, 24


class Ids:
    all_special_tokens = ()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return " ".join(str(i) for i in token_ids)


@pytest.mark.parametrize("window", [None, 5])
def test_greedy_equals_the_reference(tmp_path: Path, one_device: Partition, window: int | None) -> None:
    torch.manual_seed(3)
    shared: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    reference: Any
    if window is None:
        reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    else:
        config = transformers.MistralConfig(**shared, sliding_window=window, head_dim=8)
        reference = transformers.MistralForCausalLM(config)
    reference.eval().save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    given = [rng.integers(3, VOCAB, n).tolist() for n in (1, 4, 9, 13, 2)]
    expected = []
    for tokens in given:
        with torch.no_grad():
            out = reference.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=[7, 8],
                pad_token_id=0,
            )
        expected.append(out[0, len(tokens) :].tolist())

    model, params = load_model(tmp_path, "lm", one_device)
    engine = Engine(model, Ids(), one_device, rows=3, max_prompt_tokens=13, max_new_tokens=NEW)
    sampling = Sampling(temperature=0, max_new_tokens=NEW, stop_token_ids=(7, 8))
    prompts = [Prompt([], "", tokens, {}, f"row {i}", i) for i, tokens in enumerate(given)]
    _, samples = engine.generate(params, prompts, sampling, seed=0, sample_ids=range(5), groups=range(5), version=0)
    assert [s.tokens for s in samples] == expected
    assert len({tuple(t) for t in expected}) == 5
