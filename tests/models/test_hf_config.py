"""Reading config.json: the defaults of transformers, both spellings of rotary embeddings, and refused switches."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from yatt_jax.models.config import DecoderConfig, Rope
from yatt_jax.models.families import FAMILIES, from_hf, to_hf
from yatt_jax.models.hf_config import ConfigError
from yatt_jax.models.layers import rope_frequencies

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "default": None,
    "linear": {"type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.6, "beta_fast": 16, "beta_slow": 2},
    "yarn-given": YARN | {"attention_factor": 0.7, "truncate": False},
    "yarn-no-factor": YARN | {"factor": None},
}


def bare(model_type: str, **values: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **values}


TEXTS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
TOWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (
        transformers.Gemma3Config,
        {"text_config": {}, "vision_config": {"model_type": "siglip_vision_model", "image_size": 256,
                                              "vision_use_head": False}},
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        {"text_config": SIZES | {"hidden_size": 1024, "num_attention_heads": 8}, "vision_config": {}},
    ),
    "qwen2_audio": (transformers.Qwen2AudioConfig, {"text_config": {"model_type": "qwen2"}}),
    "qwen2_5_omni_thinker": (transformers.Qwen2_5OmniThinkerConfig, {"text_config": {}}),
}  # fmt: skip


def test_every_family_is_tested() -> None:
    assert {*TEXTS, *TOWERS} == set(FAMILIES)


@pytest.mark.parametrize("model_type", TOWERS)
def test_missing_keys_of_towers_take_the_defaults_of_transformers(model_type):
    make, values = TOWERS[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = from_hf(values | {"model_type": model_type})
        assert short == from_hf(make(**values).to_dict())


@pytest.mark.parametrize("model_type", TEXTS)
def test_missing_keys_take_the_defaults_of_transformers(model_type):
    short = from_hf(bare(model_type))
    full = CONFIGS[model_type](**SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a key that transformers writes by itself must be known
        assert short == from_hf(full.to_dict())
        assert short == from_hf(full.to_diff_dict() | {"model_type": model_type})
    assert short.kv_heads == full.num_key_value_heads
    assert short.head_dim == (getattr(full, "head_dim", None) or 2)
    assert short.tied == full.tie_word_embeddings
    if model_type == "gemma3_text":
        assert short.windows == (4096,) * 5 + (0,) + (4096,) * 2
        assert [short.ropes[i].theta for i in short.rope_of_layer] == [1e4] * 5 + [1e6] + [1e4] * 2


@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_both_spellings_of_rope_equal_transformers(scaling):
    values = SCALINGS[scaling]
    old = bare("llama", rope_theta=5000.0, rope_scaling=values, max_position_embeddings=256)
    if scaling == "yarn-no-factor":
        expected_factor = 4.0  # 256 / 64
        rope = from_hf(old).ropes[0]
        assert rope.factor == expected_factor
        return
    new = dict(old, rope_parameters={"rope_theta": 5000.0, **(values or {"rope_type": "default"})})
    del new["rope_theta"], new["rope_scaling"]
    rope = from_hf(old).ropes[0]
    assert rope == from_hf(new).ropes[0]
    config = transformers.LlamaConfig.from_dict(old | {"head_dim": 16})
    assert rope == from_hf(config.to_dict()).ropes[0]
    if rope.kind == "default":
        expected, factor = 1 / 5000.0 ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    np.testing.assert_allclose(rope_frequencies(rope, 16), expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_yarn_attention_factor_by_hand():
    # 0.1 ln 4 + 1, and (0.1 * 1.2 ln 4 + 1) / (0.1 * 0.6 ln 4 + 1).
    assert from_hf(bare("llama", rope_scaling=YARN)).ropes[0].attention_factor == pytest.approx(1.138629, abs=1e-6)
    values = bare("llama", rope_scaling=SCALINGS["yarn-mscale"])
    assert from_hf(values).ropes[0].attention_factor == pytest.approx(1.076790, abs=1e-6)


def test_gemma_ropes_in_both_spellings():
    linear = {"rope_type": "linear", "factor": 8.0}
    old = from_hf(bare("gemma3_text", rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling=linear))
    new = from_hf(
        bare(
            "gemma3_text",
            rope_parameters={
                "full_attention": {"rope_theta": 2e6, **linear},
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
            },
        )
    )
    assert old == new
    assert old.ropes == (Rope(2e6, "linear", 8.0), Rope(2e4))


PUBLISHED = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "vocab_size": 49152,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.43.1", "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_configs_are_read_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = from_hf(PUBLISHED[name])
    expected = {
        "SmolLM2-135M-Instruct": (64, (Rope(1e5),), (0,) * 30, True),
        "gemma-3-1b-it": (256, (Rope(1e6), Rope(1e4)), tuple(0 if i % 6 == 5 else 512 for i in range(26)), True),
        "Qwen2.5-0.5B-Instruct": (64, (Rope(1e6),), (0,) * 24, True),
    }
    assert (config.head_dim, config.ropes, config.windows, config.tied) == expected[name]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (bare("falcon"), "model_type = 'falcon' is not supported; llama, mistral, qwen2, qwen3, gemma3_text, .* are"),
        (bare("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling: rope type 'dynamic'"),
        (bare("llama", rope_parameters={"rope_type": "longrope"}), "rope_parameters: rope type 'longrope'"),
        (bare("llama", rope_scaling={"type": "linear"}), "rope_scaling.factor"),
        (bare("qwen2", rope_scaling=YARN | {"mrope_section": [1, 2]}), "rope_scaling.mrope_section"),
        (bare("llama", rope_scaling=LLAMA3 | {"low_freq_factor": "a"}), "rope_scaling.low_freq_factor"),
        (bare("llama", rope_parameters={"full_attention": {}}), "rope_parameters has an entry per layer type"),
        (bare("gemma3_text", rope_parameters={"rope_theta": 1e4}), "rope_parameters.rope_theta"),
        (bare("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (bare("llama", rope_parameters={"partial_rotary_factor": 0.5}), "rope_parameters.partial_rotary_factor"),
        (bare("llama", hidden_act="relu"), "hidden_act = 'relu'"),
        (bare("gemma3_text", hidden_activation="tanh"), "hidden_activation = 'tanh'"),
        (bare("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (bare("llama", quantization_config={"bits": 4}), "quantization_config"),
        (bare("mistral", is_encoder_decoder=True), "is_encoder_decoder"),
        (bare("llama", rope_interleaved=True), "rope_interleaved"),
        (bare("qwen3", layer_types=["full_attention"]), "layer_types has 1 entries for num_hidden_layers = 8"),
        (bare("qwen3", layer_types=["linear_attention"] * 8), r"layer_types\[0\] = 'linear_attention'"),
        (bare("qwen2", layer_types=["sliding_attention"] * 8), "layer_types has sliding_attention"),
        (bare("mistral", layer_types=["full_attention"] * 8), "layer_types"),
        (bare("llama", num_hidden_layers=0), "num_hidden_layers = 0"),
        (bare("llama", hidden_size="64"), "hidden_size = '64'"),
        ({"model_type": "llama", "vocab_size": 9}, "hidden_size is missing|num_attention_heads is missing"),
    ],
)
def test_refused_configs_name_the_key(values, key):
    with pytest.raises(ConfigError, match=key):
        from_hf(values)


def test_unknown_keys_are_said_and_not_silently_dropped():
    with pytest.warns(UserWarning, match="llama family does not know.*mixture_depth"):
        from_hf(bare("llama", mixture_depth=3))
    with pytest.warns(UserWarning, match="attn_logit_softcapping is not followed"):
        from_hf(bare("gemma3_text", attn_logit_softcapping=50.0))


SCRATCH = DecoderConfig(vocab=32, hidden=16, layers=4, heads=4, kv_heads=2, head_dim=8, mlp=24)
YARN_ROPE = Rope(7.0, "yarn", 3.0, 64, attention_factor=1.1, truncate=False)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", dataclasses.replace(SCRATCH, dtype="bfloat16", remat="full")),
        ("llama", dataclasses.replace(SCRATCH, qkv_bias=True, out_bias=True, mlp_bias=True, tied=False)),
        ("llama", dataclasses.replace(SCRATCH, ropes=(Rope(7.0, "linear", 3.0),), activation="gelu_tanh")),
        ("llama", dataclasses.replace(SCRATCH, ropes=(Rope(7.0, "llama3", 3.0, 64, 1.5, 5.0),))),
        ("llama", dataclasses.replace(SCRATCH, ropes=(YARN_ROPE,))),
        ("mistral", dataclasses.replace(SCRATCH, windows=(3,) * 4)),
        ("mistral", SCRATCH),
        ("qwen2", dataclasses.replace(SCRATCH, windows=(0, 3, 0, 3), qkv_bias=True)),
        ("qwen3", dataclasses.replace(SCRATCH, windows=(0, 3, 0, 3), qkv_bias=True, out_bias=True, qk_norm=True)),
        ("gemma3_text", dataclasses.replace(
            SCRATCH, qk_norm=True, norm_offset=True, post_norms=True, embed_scale=4.0, query_scale=32**-0.5,
            windows=(3, 3, 0, 3), ropes=(Rope(5.0), Rope(3.0)), rope_of_layer=(1, 1, 0, 1), final_softcap=2.0,
            activation="gelu_tanh")),
    ],
)  # fmt: skip
def test_scratch_configs_survive_the_round_trip(model_type, config):
    values = to_hf(model_type, config, max_positions=128)
    assert values["max_position_embeddings"] == 128
    assert dataclasses.replace(from_hf(values), dtype=config.dtype, remat=config.remat) == config
    theirs = CONFIGS[model_type].from_dict(values)  # transformers reads it, to the same decoder
    assert dataclasses.replace(from_hf(theirs.to_dict()), dtype=config.dtype, remat=config.remat) == config


def test_a_family_that_cannot_say_it():
    with pytest.raises(ConfigError, match="llama config cannot express this decoder: qk_norm, windows would change"):
        to_hf("llama", dataclasses.replace(SCRATCH, qk_norm=True, windows=(2, 0, 0, 0)))
