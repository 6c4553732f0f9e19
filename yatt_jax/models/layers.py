"""Layers shared by the model families: linear maps over named axes, norms, rotary positions, MLP."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from yatt_jax.models.config import DecoderConfig, Rope
from yatt_jax.parallel.partition import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], scale: float) -> nnx.Param[jax.Array]:
    """A float32 parameter that ``Model.init`` draws from N(0, scale^2).

    Modules are only ever built abstractly (``build``), so the zeros here are never allocated.

    Args:
      shape: sizes.
      axes: names of the dimensions, for the partition rules.
      scale: standard deviation at the start.
    """
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, start=(0.0, scale))


def constant(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
    """A float32 parameter that starts at a constant."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, start=(value, 0.0))


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang & Sennrich 2019): ``x / sqrt(mean(x^2) + eps) * weight``, computed in float32."""

    def __init__(self, size: int, eps: float, *, offset: bool = False):
        self.eps = eps
        self.offset = 1.0 if offset else 0.0
        self.scale = constant(1.0 - self.offset, (size,), (None,))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normed along the last dimension, in the dtype of x."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (Ba et al. 2016): ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.scale = constant(1.0, (size,), (None,))
        self.bias = constant(0.0, (size,), (None,))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normed along the last dimension, in the dtype of x."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequency of each pair of a head, ``[head_dim / 2]``, float32.

    Sources: Su et al. 2021 (default), Chen et al. 2023 (linear), Peng et al. 2023 (yarn), Llama 3.1 (llama3).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    frequency = 1.0 / (np.float32(rope.theta) ** exponent)
    if rope.kind == "linear":
        return frequency / np.float32(rope.factor)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        turns = rope.original_positions / wavelength
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * frequency / rope.factor + smooth * frequency).astype(np.float32)
    if rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            ratio = rope.original_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return (frequency / rope.factor * ramp + frequency * (1 - ramp)).astype(np.float32)
    return frequency


def rope_tables(
    config: DecoderConfig, positions: Int[Array, "B T"] | Int[Array, "B T 3"]
) -> tuple[Float[Array, "R B T H"], Float[Array, "R B T H"]]:
    """Cosines and sines of each rotary embedding of the model, ``[ropes, B, T, head_dim / 2]``, float32.

    With one position, M-RoPE turns all frequencies by it, as it does with three that are equal.
    """
    cosines, sines = [], []
    for rope in config.ropes:
        if positions.ndim == 3:
            axes = np.repeat(np.arange(len(rope.sections)) % 3, rope.sections)
            of_frequency = positions[..., axes]
        else:
            of_frequency = positions[..., None]
        angle = of_frequency.astype(jnp.float32) * rope_frequencies(rope, config.head_dim)
        cosines.append(jnp.cos(angle) * rope.attention_factor)
        sines.append(jnp.sin(angle) * rope.attention_factor)
    return jnp.stack(cosines), jnp.stack(sines)


def rotate(
    x_BTHK: Float[Array, "B T H K"], cos_BTF: Float[Array, "B T F"], sin_BTF: Float[Array, "B T F"]
) -> Float[Array, "B T H K"]:
    """Turns the pairs (i, i + K/2) of each head by the position's angle."""
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTF[:, :, None, :], sin_BTF[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def splice(
    x_BTD: Float[Array, "B T D"], features_SND: Float[Array, "S N D"], index_BT: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Embeddings with features in their place where the index is not 0; see ``types.Media``."""
    B, T, D = x_BTD.shape
    index = index_BT.reshape(features_SND.shape[0], -1, 1)
    taken = jnp.take_along_axis(features_SND, jnp.maximum(index - 1, 0), axis=1).reshape(B, T, D)
    return jnp.where((index_BT > 0)[..., None], taken, x_BTD)


class Projection(nnx.Module):
    """``y = x W + b`` contracting the last ``len(inputs)`` dimensions of x; W has shape ``inputs + outputs``.

    Once ``turned``, it has shape ``outputs + inputs``: with few rows in x, products on a CPU are a fifth quicker so.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        bias: bool,
        scale: float | None = None,
    ):
        self.contract = len(inputs)
        self.outputs_first = False
        fan_in = math.prod(inputs)
        self.kernel = weight(inputs + outputs, axes, 1 / math.sqrt(fan_in) if scale is None else scale)
        self.bias = constant(0.0, outputs, axes[len(inputs) :]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """The map in the dtype of x; leading dimensions are kept."""
        lead, kernel = x.shape[: x.ndim - self.contract], self.kernel[...].astype(x.dtype)
        # One plain matrix product: on a CPU its gradients run up to twice as fast as products over several dimensions.
        if self.outputs_first:
            outputs = kernel.shape[: kernel.ndim - self.contract]
            kernel = kernel.reshape(math.prod(outputs), -1)
            y = jax.lax.dot_general(x.reshape(-1, kernel.shape[1]), kernel, (((1,), (1,)), ((), ())))
        else:
            outputs = kernel.shape[self.contract :]
            kernel = kernel.reshape(-1, math.prod(outputs))
            y = x.reshape(-1, kernel.shape[0]) @ kernel
        y = y.reshape(*lead, *outputs)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def turned(self) -> jax.Array:
        """The kernel as ``outputs + inputs``."""
        kernel = self.kernel[...]
        inputs = tuple(range(self.contract))
        return jnp.transpose(kernel, (*range(self.contract, kernel.ndim), *inputs))


class MLP(nnx.Module):
    """Gated MLP (Shazeer 2020): ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, width: int, activation: str, *, bias: bool):
        D, F = hidden, width
        self.activation = activation
        self.gate = Projection((D,), (F,), ("embed", "mlp"), bias=bias)
        self.up = Projection((D,), (F,), ("embed", "mlp"), bias=bias)
        self.down = Projection((F,), (D,), ("mlp", "embed"), bias=bias)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The output in the dtype of x."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        gate = ACTIVATIONS[self.activation](self.gate(x_ND))
        return self.down(constrain(gate * self.up(x_ND), "rows", "act_mlp")).reshape(x_BTD.shape)


class FeedForward(nnx.Module):
    """MLP without a gate: ``down(activation(up(x)))``, with biases."""

    def __init__(self, inputs: int, width: int, outputs: int, activation: str):
        self.activation = activation
        self.up = Projection((inputs,), (width,), ("embed", "mlp"), bias=True)
        self.down = Projection((width,), (outputs,), ("mlp", "embed"), bias=True)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """The output in the dtype of x."""
        x = constrain(self.up(x_BTD), "rows", None, "act_mlp")
        return self.down(ACTIVATIONS[self.activation](x))
