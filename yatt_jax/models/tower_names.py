"""Rows of name tables for towers; see ``names``."""

from __future__ import annotations

from collections.abc import Mapping

from yatt_jax.models.names import Name

_QKV = "(h k) d -> d h k", "(h k) -> h k"
_OUT = "d (h k) -> h k d", "d -> d"


def linear(hf: str, path: str, kernel: str = "f d -> d f", bias: str = "f -> f") -> tuple[Name, ...]:
    """The kernel and the bias of a linear map."""
    return Name(f"{hf}.weight", f"{path}/kernel", kernel), Name(f"{hf}.bias", f"{path}/bias", bias)


def norm(hf: str, path: str) -> tuple[Name, ...]:
    """The weight and the bias of a norm; the second lies unused in RMS norms."""
    return Name(f"{hf}.weight", f"{path}/scale", "d -> d"), Name(f"{hf}.bias", f"{path}/bias", "d -> d")


def blocks(
    hf: str, path: str, *, norms: tuple[str, str], attention: str, parts: str, out: str, mlp: Mapping[str, str]
) -> tuple[Name, ...]:
    """The blocks of an encoder.

    Args:
      hf: beginning of their names, with ``{layer}``.
      path: of the encoder.
      norms: of attention and MLP.
      attention: the module of attention.
      parts: what its maps are called, with ``{part}`` for q, k and v; without it, the three are one tensor.
      out: what its output map is called.
      mlp: modules of the MLP by our names.
    """
    own = f"{path}/layers"
    rows = norm(hf + norms[0], f"{own}/attention_norm") + norm(hf + norms[1], f"{own}/mlp_norm")
    if "{part}" in parts:
        for part in "qkv":
            rows += linear(hf + attention + parts.replace("{part}", part), f"{own}/attention/{part}", *_QKV)
    else:
        fused = "(n h k) d -> d n h k", "(n h k) -> n h k"
        rows += linear(hf + attention + parts, f"{own}/attention/qkv", *fused)
    rows += linear(hf + attention + out, f"{own}/attention/o", *_OUT)
    for name, module in mlp.items():
        rows += linear(hf + module, f"{own}/mlp/{name}")
    return rows


def whisper(path: str) -> tuple[Name, ...]:
    """The stack of Whisper's encoder with its convolutions, without what follows."""
    return (
        *linear("conv1", f"{path}/first", "d f w -> w f d", "d -> d"),
        *linear("conv2", f"{path}/second", "d f w -> w f d", "d -> d"),
        *blocks(
            "layers.{layer}.",
            f"{path}/encoder",
            norms=("self_attn_layer_norm", "final_layer_norm"),
            attention="self_attn.",
            parts="{part}_proj",
            out="out_proj",
            mlp={"up": "fc1", "down": "fc2"},
        ),
    )


def siglip(path: str) -> tuple[Name, ...]:
    """SigLIP without its pooling head."""
    return (
        *linear("embeddings.patch_embedding", f"{path}/patch", "d c p q -> c p q d", "d -> d"),
        Name("embeddings.position_embedding.weight", f"{path}/places", "n d -> n d"),
        *blocks(
            "encoder.layers.{layer}.",
            f"{path}/encoder",
            norms=("layer_norm1", "layer_norm2"),
            attention="self_attn.",
            parts="{part}_proj",
            out="out_proj",
            mlp={"up": "mlp.fc1", "down": "mlp.fc2"},
        ),
        *norm("post_layernorm", f"{path}/norm"),
    )


def qwen_vision(path: str, parts: str) -> tuple[Name, ...]:
    """The tower of Qwen2.5-VL; ``parts`` as in ``blocks``."""
    return (
        Name("patch_embed.proj.weight", f"{path}/patch/kernel", "d c t p q -> c t p q d"),
        *blocks(
            "blocks.{layer}.",
            f"{path}/encoder",
            norms=("norm1", "norm2"),
            attention="attn.",
            parts=parts,
            out="proj",
            mlp={"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
        ),
        *norm("merger.ln_q", f"{path}/norm"),
        *linear("merger.mlp.0", f"{path}/merge/up"),
        *linear("merger.mlp.2", f"{path}/merge/down"),
    )
