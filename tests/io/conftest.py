"""Tiny random models of every family, made by transformers on torch and saved as folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

torch.set_num_threads(1)  # tiny matrices; more threads only wait for each other

_SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GEMMA = dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=24)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    "llama-tied-llama3": ("Llama", dict(tie_word_embeddings=True, rope_theta=500.0, rope_scaling=_LLAMA3)),
    "llama-linear": ("Llama", dict(head_dim=16, rope_scaling={"rope_type": "linear", "factor": 3.0})),
    "llama-yarn": ("Llama", dict(hidden_act="gelu_pytorch_tanh", rope_scaling=_YARN)),
    "llama-yarn-mscale": ("Llama", dict(rope_scaling=_YARN | {"mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 4.0})),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "mistral-full": ("Mistral", dict(sliding_window=None, hidden_act="gelu", tie_word_embeddings=True)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, rope_scaling=_YARN | {"truncate": False})),
    "qwen2-windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-bias": ("Qwen3", dict(head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=6,
                                 layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "gemma3": ("Gemma3", dict(**_GEMMA, sliding_window_pattern=3, final_logit_softcapping=3.0)),
    "gemma3-linear": ("Gemma3", dict(**_GEMMA, attention_bias=True, tie_word_embeddings=False,
                                     rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=500.0,
                                     layer_types=["full_attention", "sliding_attention", "sliding_attention"])),
}  # fmt: skip
FAMILY_CASES = ["llama", "llama-tied-llama3", "mistral", "qwen2", "qwen3-bias", "gemma3"]


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A saved random model."""

    folder: Path
    model: Any


def scramble(model: torch.nn.Module, seed: int = 0) -> None:
    """Draws every parameter anew, so that no norm is 1 and no bias 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            noise *= 1.5 * parameter.shape[1] ** -0.5
        elif "norm" in name:
            noise = 1 + 0.3 * noise
        else:
            noise *= 0.3
        parameter.data.copy_(noise)


def make(family: str, options: dict[str, Any], head: str = "ForCausalLM", seed: int = 0) -> Any:
    """A random torch model."""
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    prefix = "Gemma3Text" if family == "Gemma3" and head != "ForCausalLM" else family
    config = config_class(**(_SIZES | options), attn_implementation="eager")
    model = getattr(transformers, prefix + head)(config).eval()
    scramble(model, seed)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """Makes (once) the named model, saved as a folder."""
    made: dict[tuple[Any, ...], Tiny] = {}

    def get(case: str, head: str = "ForCausalLM", **options: Any) -> Tiny:
        key = (case, head, repr(sorted(options.items())))
        if key not in made:
            family, values = CASES[case]
            model = make(family, values | options, head)
            folder = tmp_path_factory.mktemp(case)
            model.save_pretrained(folder)
            made[key] = Tiny(folder, model)
        return made[key]

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``case`` runs over every model, ``family_case`` over one or two a family."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(CASES))
    if "family_case" in metafunc.fixturenames:
        metafunc.parametrize("family_case", FAMILY_CASES)
