"""Reading config.json key by key, so that no switch is overlooked; rotary embeddings in both spellings.

transformers 5 keeps everything about rotary embeddings in ``rope_parameters``; before, it was ``rope_theta`` beside
``rope_scaling``. Missing keys take the defaults of the transformers configuration classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from yatt_jax.errors import InputError
from yatt_jax.models.config import DecoderConfig, Rope

Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATION_NAMES: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

ACTIVATION_KEYS: Mapping[str, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

# Keys that do not change what the model computes (dropout is off in this trainer; see docs/numerics.md).
# fmt: off
_HARMLESS = frozenset(
    {
        "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "bos_token_id",
        "cache_implementation", "chunk_size_feed_forward", "classifier_dropout", "dtype", "eos_token_id",
        "finetuning_task", "hidden_dropout", "id2label", "initializer_range", "is_decoder", "is_llama_config",
        "label2id", "max_position_embeddings", "model_type", "num_labels", "output_attentions",
        "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "return_dict",
        "sep_token_id", "task_specific_params", "tf_legacy_loss", "token_classification_bias", "tokenizer_class",
        "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "use_bfloat16", "use_cache",
    }
)
# fmt: on
# Keys that would change it: accepted only with a value that means "off".
_UNSUPPORTED = {
    "quantization_config": "weights must be stored as bfloat16, float16 or float32; dequantize the folder first",
    "compression_config": "weights must be stored uncompressed; decompress the folder first",
    "add_cross_attention": "only decoders without cross-attention can be built",
    "is_encoder_decoder": "only decoders can be built",
    "pruned_heads": "heads cannot be pruned",
    "rope_interleaved": "rotary embeddings turn the pairs (i, i + head_dim / 2) only",
}


class ConfigError(InputError):
    """A config.json that cannot be followed; the message names the key."""


class HfConfig:
    """A config.json, or a part of one, whose keys are asked for one by one.

    Args:
      values: its keys.
      part: key of the part, for messages.
    """

    def __init__(self, values: Mapping[str, Any], part: str = ""):
        self.values = values
        self.prefix = f"{part}." if part else ""
        self.family = str(values.get("model_type"))
        self._asked: set[str] = set()

    def get(self, key: str, default: Any) -> Any:
        """A value, or the family's default where the key is missing or null."""
        self._asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def optional(self, key: str, default: Any) -> Any:
        """The same for a key where null is a value of its own ("off")."""
        self._asked.add(key)
        return self.values.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number.

        Raises:
          ConfigError: missing without a default, or not such a number.
        """
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"config key {self.prefix}{key} is missing: a {self.family} config needs it")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config key {self.prefix}{key} = {value!r}: a positive whole number is needed")
        return value

    def activation(self, key: str, default: str) -> Activation:
        """The MLP activation under our name."""
        value = self.get(key, default)
        if value not in ACTIVATION_NAMES:
            known = ", ".join(ACTIVATION_NAMES)
            raise ConfigError(f"config key {self.prefix}{key} = {value!r} is not supported; {known} are")
        return ACTIVATION_NAMES[value]

    def part(self, key: str, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A config within the config.

        Raises:
          ConfigError: missing without a default, or not an object.
        """
        value = self.get(key, default)
        if not isinstance(value, Mapping):
            missing = "is missing" if value is None else f"= {value!r}"
            raise ConfigError(f"config key {self.prefix}{key} {missing}: a {self.family} config needs an object here")
        return dict(value)

    def require_off(self, key: str, off: tuple[Any, ...], reason: str) -> None:
        """Refuses a switch unless it is absent, null or one of ``off``."""
        value = self.get(key, None)
        if value is not None and value not in off:
            raise ConfigError(f"config key {self.prefix}{key} = {value!r} is not supported: {reason}")

    def finish(self) -> None:
        """Refuses known switches that nothing implements, and warns of keys that nobody knows.

        Raises:
          ConfigError: such a switch is on.
        """
        for key, reason in _UNSUPPORTED.items():
            self.require_off(key, (False, {}, [], ""), reason)
        self.require_off("partial_rotary_factor", (1, 1.0), "rotary embeddings turn whole heads")
        unknown = [
            k for k, v in self.values.items() if k not in self._asked | _HARMLESS and v not in (None, False, {}, [])
        ]
        if unknown:
            warnings.warn(
                f"config keys that the {self.family} family does not know, and that change nothing here: "
                + ", ".join(self.prefix + key for key in sorted(unknown)),
                stacklevel=3,
            )


def read_rope(config: HfConfig, default_theta: float = 10000.0) -> Rope:
    """The one rotary embedding of a family that has one.

    Raises:
      ConfigError: an unsupported kind or a malformed entry.
    """
    theta = config.get("rope_theta", default_theta)
    new, old = config.get("rope_parameters", None), config.get("rope_scaling", None)
    # transformers lets the older key win where a folder carries both.
    key = "rope_scaling" if old else "rope_parameters"
    return parse_rope(old or new or {}, theta, config, key)


def parse_rope(entry: Mapping[str, Any], theta: float, config: HfConfig, key: str) -> Rope:
    """A rotary embedding from one ``rope_parameters`` or ``rope_scaling`` entry.

    Args:
      entry: the entry.
      theta: base of the frequencies where the entry has none.
      config: the whole config, for the context length.
      key: where the entry stands, for messages.
    """
    if any(isinstance(value, Mapping) for value in entry.values()):
        raise ConfigError(
            f"config key {key} has an entry per layer type, which the {config.family} family does not have"
        )
    kind = entry.get("rope_type", entry.get("type", "default"))
    allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    fields: dict[str, Any] = {"theta": float(entry.get("rope_theta") or theta), "kind": kind}
    if kind == "linear":
        allowed |= {"factor"}
        fields |= {"factor": _number(entry, "factor", key)}
    elif kind == "llama3":
        allowed |= {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        fields |= {name: _number(entry, name, key) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        fields |= {"original_positions": _original(entry, config)}
    elif kind == "yarn":
        allowed |= {"factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"}
        allowed |= {"beta_fast", "beta_slow", "truncate", "finetuned"}
        fields |= _yarn(entry, config, key)
    elif kind != "default":
        raise ConfigError(f"config key {key}: rope type {kind!r} is not supported; default, linear, llama3, yarn are")
    if entry.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"config key {key}.partial_rotary_factor is not supported: rotary embeddings turn whole heads"
        )
    # Old folders repeat scaling keys that a default rope does not read, as null.
    unknown = sorted(name for name, value in entry.items() if name not in allowed and value is not None)
    if unknown:
        raise ConfigError(f"config key {key}.{unknown[0]} is not read by rope type {kind!r}; remove it if it is stale")
    return Rope(**fields)


def _original(entry: Mapping[str, Any], config: HfConfig) -> int:
    """Context length before stretching; a top-level key has precedence, as in transformers."""
    top = config.get("original_max_position_embeddings", None)
    value = top or entry.get("original_max_position_embeddings") or config.get("max_position_embeddings", None)
    if value is None:
        raise ConfigError("config key rope_parameters.original_max_position_embeddings is missing")
    return int(value)


def _number(entry: Mapping[str, Any], name: str, key: str) -> float:
    value = entry.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config key {key}.{name} = {value!r}: a positive number is needed")
    return float(value)


def _yarn(entry: Mapping[str, Any], config: HfConfig, key: str) -> dict[str, Any]:
    """Yarn's fields; the factor on cosine and sine follows Peng et al. 2023 unless it is given."""
    original = _original(entry, config)
    if entry.get("factor") is None:
        factor = config.size("max_position_embeddings") / original
    else:
        factor = _number(entry, "factor", key)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor, mscale, all_dim = (entry.get(n) for n in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention_factor is None:
        attention_factor = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return {
        "factor": factor,
        "original_positions": original,
        "attention_factor": float(attention_factor),
        "beta_fast": float(entry.get("beta_fast") or 32),
        "beta_slow": float(entry.get("beta_slow") or 1),
        "truncate": bool(entry.get("truncate", True)),
    }


def write_rope(rope: Rope) -> dict[str, Any]:
    """A rotary embedding as ``rope_theta`` and ``rope_scaling``, which every transformers version reads."""
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if scaling is not None and rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_positions
    if scaling is not None and rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if scaling is not None and rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {"attention_factor": rope.attention_factor}
    if rope.sections:
        scaling = (scaling or {"rope_type": "default"}) | {"mrope_section": list(rope.sections)}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def common_fields(config: HfConfig) -> dict[str, Any]:
    """The fields every family spells alike."""
    return {
        "vocab": config.size("vocab_size"),
        "hidden": config.size("hidden_size"),
        "layers": config.size("num_hidden_layers"),
        "heads": config.size("num_attention_heads"),
        "mlp": config.size("intermediate_size"),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
    }


def common_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys every family spells alike."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }


def activation_key(config: DecoderConfig) -> str:
    """The MLP activation under its Hugging Face name."""
    return ACTIVATION_KEYS[config.activation]


def check_layer_types(kinds: Sequence[str], layers: int) -> None:
    """Checks a list of layer types.

    Raises:
      ConfigError: a wrong length, or a kind other than full and sliding attention.
    """
    if len(kinds) != layers:
        raise ConfigError(f"config key layer_types has {len(kinds)} entries for num_hidden_layers = {layers}")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config key layer_types[{layer}] = {kind!r} is not supported; full_attention and sliding_attention are"
            )


def upper_windows(config: HfConfig) -> tuple[int, ...]:
    """Windows of the Qwen families: ``layer_types``, or every layer from ``max_window_layers`` on."""
    layers = config.size("num_hidden_layers")
    size, on = config.optional("sliding_window", 4096), config.get("use_sliding_window", False)
    window = size if on else None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    check_layer_types(kinds, layers)
    if "sliding_attention" in kinds and not window:
        raise ConfigError(
            "config key layer_types has sliding_attention, which needs use_sliding_window = true and a sliding_window"
        )
    return tuple(window if window and kind == "sliding_attention" else 0 for kind in kinds)


def window_keys(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of ``upper_windows``."""
    window = max(config.windows)
    return {
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if size else "full_attention" for size in config.windows],
    }
