"""GGUF files as Hugging Face models: configuration, tensors and tokenizer.

What llama.cpp's converter does to a folder is undone here: names, the row order of queries and keys (its rotary
embedding turns neighbours, ours turns halves), Gemma's norms (stored with the 1 added).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import Keys
from transformers import PreTrainedTokenizerFast

from yatt_jax.io.gguf_file import GgufFile
from yatt_jax.io.gguf_tokenizer import tokenizer_from_metadata
from yatt_jax.io.tensors import CheckpointError
from yatt_jax.models.config import Rope
from yatt_jax.models.families import FAMILIES
from yatt_jax.models.layers import rope_frequencies
from yatt_jax.models.names import Slices

_ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
# Metadata key after the architecture -> config.json key.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its chat template and special tokens.

    Raises:
      CheckpointError: a missing, truncated or foreign file, or a tokenizer kind that is not known.
    """
    return tokenizer_from_metadata(GgufFile(path).metadata, str(path))


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that a GGUF file's metadata amounts to.

    Raises:
      CheckpointError: an architecture or rotary scaling that cannot be expressed, or a missing key.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture = {architecture!r} is not supported; {', '.join(_ARCHITECTURES)} are"
        )
    window = file.metadata.get(f"{architecture}.attention.sliding_window")
    model_type = "mistral" if architecture == "llama" and window else _ARCHITECTURES[architecture]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [FAMILIES[model_type].architectures["lm"]]}
    for key, name in _KEYS.items():
        value = file.metadata.get(f"{architecture}.{key}")
        if isinstance(value, list):
            raise CheckpointError(
                f"{file.path}: {architecture}.{key} differs by layer, which {model_type} does not have"
            )
        if value is not None:
            config[name] = _shortest(value)
    missing = [key for key, name in _KEYS.items() if name in _REQUIRED and name not in config]
    if missing:
        raise CheckpointError(f"{file.path}: metadata key {architecture}.{missing[0]} is missing")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing: the file holds no language model")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config |= _switches(file, model_type, config, window) | _rope(file, architecture, config) | _special_ids(file)
    return config


def _shortest(value: Any) -> Any:
    """Metadata floats are float32: 1e-5 reads as 9.999999747378752e-06, and is meant as 1e-5."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _switches(file: GgufFile, model_type: str, config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """Keys that metadata leaves to the tensors present, or to what llama.cpp fixes for the architecture."""
    bias = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        return {"attention_bias": bias, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    if model_type == "mistral":
        return {"sliding_window": window}
    if model_type == "qwen2":
        return {"use_sliding_window": False}
    if model_type == "qwen3":
        return {"use_sliding_window": False, "attention_bias": bias}
    # The 27B model scales queries by hidden size / heads, the others by the head size; metadata does not say which.
    largest = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config.get("head_dim", 256)
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):  # one entry a layer
        layers: Any = {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}
    else:
        layers = {"sliding_window_pattern": pattern}
    return layers | {
        "sliding_window": window,
        "rope_local_base_freq": _shortest(file.metadata.get("gemma3.rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": file.metadata.get("gemma3.final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _rope(file: GgufFile, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling``, from the metadata or from the per-frequency factors of Llama 3.1."""
    get = lambda key: file.metadata.get(f"{architecture}.rope.{key}")  # noqa: E731
    turned, head_dim = get("dimension_count"), file.metadata.get(f"{architecture}.attention.key_length")
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    if turned not in (None, head_dim):
        raise CheckpointError(
            f"{file.path}: {architecture}.rope.dimension_count = {turned} and heads of {head_dim}: rotary embeddings "
            f"turn whole heads"
        )
    kind, factor = get("scaling.type"), get("scaling.factor") or get("scale_linear")
    original = get("scaling.original_context_length")
    if _ROPE_FACTORS in file.tensors:
        return {"rope_scaling": _llama3(file, config)}
    if kind in (None, "none") and factor in (None, 1.0):
        return {}
    if kind in (None, "linear"):
        return {"rope_scaling": {"rope_type": "linear", "factor": _shortest(factor)}}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": _shortest(factor), "original_max_position_embeddings": original}
        for key in ("beta_fast", "beta_slow"):
            value = get(f"scaling.yarn_{key}")
            scaling |= {} if value is None else {key: _shortest(value)}
        extra = (get("scaling.attn_factor") or 1.0) * (get("scaling.yarn_attn_factor") or 1.0)
        if extra != 1:  # llama.cpp multiplies the usual factor by it; transformers has the product
            scaling["attention_factor"] = extra * (0.1 * math.log(float(factor or 1)) + 1)
        return {"rope_scaling": scaling}
    raise CheckpointError(
        f"{file.path}: {Keys.Rope.SCALING_TYPE.format(arch=architecture)} = {kind!r} is not supported"
    )


def _llama3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The llama3 scaling whose factors the file carries; its constants are those of every release, and checked."""
    factors = file.rows(_ROPE_FACTORS, slice(None)).astype(np.float32)
    theta = float(config["rope_theta"])
    rope = Rope(theta, "llama3", float(_shortest(float(factors.max()))), original_positions=8192)
    head_dim = 2 * len(factors)
    expected = rope_frequencies(Rope(theta), head_dim) / rope_frequencies(rope, head_dim)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: tensor {_ROPE_FACTORS} is not the llama3 rotary scaling; use the original folder"
        )
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_positions,
    }


def _special_ids(file: GgufFile) -> dict[str, Any]:
    get = lambda key: file.metadata.get(f"tokenizer.ggml.{key}_token_id")  # noqa: E731
    ends = [get(key) for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    ids = {"bos_token_id": get("bos"), "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    return {key: value for key, value in (ids | {"pad_token_id": get("padding")}).items() if value is not None}


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face names and in Hugging Face layout."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]):
        """Args: the file, and its ``hf_config``."""
        self._file = file
        self._gemma = config["model_type"].startswith("gemma")
        permuted = config["model_type"] in ("llama", "mistral")
        heads = config["num_attention_heads"]
        self._heads = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)} if permuted else {}
        self._raw = {self._hf_name(name): name for name in file.tensors if name != _ROPE_FACTORS}

    def _hf_name(self, raw: str) -> str:
        """The Hugging Face name; a tensor that no table knows keeps its own, and is refused by the loader."""
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", raw)
        table = _GEMMA_BLOCK if self._gemma else _BLOCK
        if match and match[2] in table:
            return f"model.layers.{match[1]}.{table[match[2]]}.{match[3]}"
        return _TOP.get(raw, raw)

    def names(self) -> Sequence[str]:
        """Every tensor of the file."""
        return list(self._raw)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor."""
        return self._file.tensors[self._raw[name]].shape

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """Part of a tensor, dequantized row by row."""
        raw = self._raw[name]
        rows: slice | np.ndarray = slices[0]
        part = raw.split(".")[2] if raw.startswith("blk.") else ""
        if part in self._heads:
            # Row (head, half, pair) of ours is row (head, pair, half) of the file.
            size = self._file.tensors[raw].shape[0]
            order = np.arange(size).reshape(self._heads[part], -1, 2).swapaxes(1, 2).reshape(-1)
            rows = order[rows]
        values = self._file.rows(raw, rows)[(slice(None), *slices[1:])]
        return values - np.float32(1) if self._gemma and raw.endswith("norm.weight") else values

    def file_of(self, name: str) -> str:
        """The file."""
        return str(self._file.path)
