"""One decoder for every text family: embeddings, a scanned stack of blocks, a final norm.

Blocks are built once per layer with stacked parameters (a leading layer dimension) and run by ``jax.lax.scan``, so
that compile time does not grow with depth. What differs between layers of one model, the sliding window and the rotary
table, is data that the scan reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from yatt_jax.models.attention import attend, writes_by_head
from yatt_jax.models.audio import AudioTower
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.layers import MLP, Projection, RMSNorm, rope_tables, rotate, splice, weight
from yatt_jax.models.vision import vision_tower
from yatt_jax.ops.attention import Cached, Packed
from yatt_jax.parallel.partition import constrain
from yatt_jax.types import Inputs, Media, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far, by row and slot.

    Slot s of row b holds token s of that row: rows are contiguous from slot 0. A token sees the slots up to its own,
    so a slot past the row's length may hold anything that is finite. A decoder takes one cache for all layers, or, with
    ``blocks``, one for each (L is then 1). ``places_last`` is the layout of the keys (see ``ops.attention.Cached``).
    """

    keys: Float[Array, "L B J S K"] | Float[Array, "L B J K S"]
    values: Float[Array, "L B J S K"]
    places_last: bool = dataclasses.field(default=False, metadata={"static": True})

    @staticmethod
    def zeros(
        config: DecoderConfig, rows: int, slots: int, dtype: str | None = None, *, places_last: bool = False
    ) -> Cache:
        """An empty cache for ``rows`` rows of at most ``slots`` tokens."""
        shape = (config.layers, rows, config.kv_heads, slots, config.head_dim)
        dtype = dtype or config.dtype
        # Two buffers, so that both can be donated.
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)).laid_out(places_last)

    def laid_out(self, places_last: bool) -> Cache:
        """The same with its keys in this layout."""
        keys = self.keys if places_last == self.places_last else jnp.swapaxes(self.keys, 3, 4)
        return Cache(keys, self.values, places_last)


@dataclasses.dataclass(frozen=True)
class _Context:
    """What every layer of one call shares. ``start_B`` is None without a cache."""

    cos_RBTF: jax.Array
    sin_RBTF: jax.Array
    segments_BT: jax.Array
    spans_BT: jax.Array | None
    start_B: jax.Array | None


class Attention(nnx.Module):
    """Self-attention of one layer."""

    def __init__(self, config: DecoderConfig):
        D, H, J, K = config.hidden, config.heads, config.kv_heads, config.head_dim
        self.config = config
        self.q = Projection((D,), (H, K), ("embed", "heads", None), bias=config.qkv_bias)
        self.k = Projection((D,), (J, K), ("embed", "kv_heads", None), bias=config.qkv_bias)
        self.v = Projection((D,), (J, K), ("embed", "kv_heads", None), bias=config.qkv_bias)
        self.o = Projection((H, K), (D,), ("heads", None, "embed"), bias=config.out_bias)
        self.q_norm = RMSNorm(K, config.norm_eps, offset=config.norm_offset) if config.qk_norm else None
        self.k_norm = RMSNorm(K, config.norm_eps, offset=config.norm_offset) if config.qk_norm else None

    def __call__(
        self,
        x_BTD: jax.Array,
        context: _Context,
        window: int | jax.Array,
        rope: int | jax.Array,
        layer: jax.Array,
        cache: Cache | None,
    ) -> tuple[jax.Array, Cache]:
        """Attention outputs ``[B, T, D]``, and the cache with this layer's keys and values written.

        Without a cache, the keys and values themselves, ``[B, J, T, K]`` each. ``window`` and ``rope`` say which of
        the model's the layer has.
        """
        q = constrain(self.q(x_BTD), "rows", None, "act_heads", None)
        k = constrain(self.k(x_BTD), "rows", None, "act_kv_heads", None)
        v = constrain(self.v(x_BTD), "rows", None, "act_kv_heads", None)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = context.cos_RBTF[rope], context.sin_RBTF[rope]
        q, k_BJTK, v_BJTK = rotate(q, cos, sin), rotate(k, cos, sin).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if cache is None:
            seen, cache = Packed(context.segments_BT, context.spans_BT), Cache(k_BJTK, v_BJTK)
        else:
            assert context.start_B is not None
            seen = Cached(context.start_B, layer, cache.places_last)
            cache = write(cache, layer, context.start_B, k_BJTK, v_BJTK)
        out = attend(
            q,
            cache.keys,
            cache.values,
            seen,
            windows=self.config.distinct_windows,
            which=window,
            scale=self.config.query_scale,
            softcap=self.config.attention_softcap,
            form=self.config.attention,
        )
        return self.o(constrain(out, "rows", None, "act_heads", None)), cache


def write(cache: Cache, layer: jax.Array, start_B: jax.Array, k_BJTK: jax.Array, v_BJTK: jax.Array) -> Cache:
    """Puts new keys and values of one layer into slots ``start .. start + T - 1`` of each row."""
    B, J, T, _ = k_BJTK.shape
    slots = start_B[:, None] + jnp.arange(T)
    by_head = writes_by_head()
    if by_head:
        slots = jnp.broadcast_to(slots[:, None], (B, J, T))
    indices = jnp.stack([jnp.broadcast_to(layer, slots.shape), slots], axis=-1)

    def put(buffer: jax.Array, new_BJTK: jax.Array, slots: int) -> jax.Array:
        # Rows are a batch dimension of the scatter: with row numbers among its indices, rows that are split over
        # devices would be gathered on each of them.
        dimensions = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(3,) if by_head else (1, 3),
            inserted_window_dims=(0, slots),
            scatter_dims_to_operand_dims=(0, slots),
            operand_batching_dims=(1, 2) if by_head else (1,),
            scatter_indices_batching_dims=(0, 1) if by_head else (0,),
        )
        # Out-of-range slots are dropped: padding at the end of a prefill may reach past the cache.
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        new_BJTK = new_BJTK.astype(buffer.dtype)
        return jax.lax.scatter(buffer, indices, new_BJTK, dimensions, unique_indices=True, mode=mode)

    keys = put(cache.keys, k_BJTK, 4 if cache.places_last else 3)
    return Cache(keys, put(cache.values, v_BJTK, 3), cache.places_last)


class Block(nnx.Module):
    """Attention and MLP with their norms and residual connections."""

    def __init__(self, config: DecoderConfig):
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config.hidden, config.mlp, config.activation, bias=config.mlp_bias)
        self.post_attention_norm = _norm(config) if config.post_norms else None
        self.post_mlp_norm = _norm(config) if config.post_norms else None

    def __call__(
        self,
        x: jax.Array,
        context: _Context,
        window: int | jax.Array,
        rope: int | jax.Array,
        layer: jax.Array,
        cache: Cache | None,
    ) -> tuple[jax.Array, Cache]:
        """The residual stream after the block, and the cache as ``Attention`` returns it."""
        y, cache = self.attention(self.attention_norm(x), context, window, rope, layer, cache)
        x = x + (y if self.post_attention_norm is None else self.post_attention_norm(y))
        y = self.mlp(self.mlp_norm(x))
        x = x + (y if self.post_mlp_norm is None else self.post_mlp_norm(y))
        return constrain(x, "rows", None, None), cache


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden, config.norm_eps, offset=config.norm_offset)


def _projections(block: Block) -> list[Projection]:
    return [module for _, module in nnx.iter_modules(block) if isinstance(module, Projection)]


def _turned(block: Block) -> PyTree:
    """The parameters of a layer, with its kernels turned."""
    for projection in _projections(block):
        projection.kernel = nnx.Param(projection.turned())
    return nnx.to_pure_dict(nnx.state(block))


class Decoder(nnx.Module):
    """The stack: tokens in, hidden states after the final norm out."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        # Tables start at 1/sqrt(D) for the output side; families with embed_scale multiply by sqrt(D) going in.
        self.embedding = weight((config.vocab, config.hidden), ("vocab", "embed"), config.hidden**-0.5)
        self.layers = nnx.vmap(lambda: Block(config), out_axes=0, axis_size=config.layers)()
        self.norm = _norm(config)
        self.vision = vision_tower(config)
        self.audio = AudioTower(config) if config.audio else None

    def embed(self, tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
        """Embeddings of tokens, scaled as the family asks, in the compute dtype."""
        # Whole rows of the table: were they split by fsdp, the lookup would gather the batch to undo that.
        table = constrain(self.embedding[...], "act_vocab", None)
        x = jnp.take(table, tokens, axis=0).astype(self.config.dtype)
        return x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def features(self, media: Media) -> Float[Array, "S N D"]:
        """What the towers make of media, in the compute dtype: features of patches first, then those of frames."""
        dtype = self.config.dtype
        if media.features is not None:
            return media.features.astype(dtype)
        parts: list[jax.Array] = []
        if media.patches is not None:
            assert self.vision is not None, "media with patches, and the model has no vision tower"
            parts.append(self.vision(media.patches))
        if media.frames is not None:
            assert self.audio is not None, "media with frames, and the model has no audio tower"
            parts.append(self.audio(media.frames))
        return jnp.concatenate(parts, axis=1)

    def unstack(self) -> tuple[PyTree, ...]:
        """The parameters of each layer by themselves.

        What runs again and again on a CPU takes them out of the stack once, before it starts: there, the scan copies
        each layer's weights out of the stack every time, which costs a decode step as much as using them. The kernels
        are turned, see ``Projection``.
        """
        graph, stacked = nnx.split(self.layers)
        return tuple(
            _turned(nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], stacked))) for i in range(self.config.layers)
        )

    def blocks(self, layers: tuple[PyTree, ...]) -> tuple[Block, ...]:
        """The layers as modules of their own, of parameters from ``unstack``."""
        graph, _ = nnx.split(self.layers)
        found = tuple(nnx.merge(graph, layer) for layer in layers)
        for block in found:
            for projection in _projections(block):
                projection.outputs_first = True
        return found

    def __call__(
        self,
        inputs: Inputs,
        cache: Cache | tuple[Cache, ...] | None = None,
        start_B: Int[Array, "B"] | None = None,
        blocks: tuple[Block, ...] | None = None,
        *,
        collect: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Runs the stack.

        Without a cache, tokens attend to earlier tokens of their segment in the row. With one, the T new tokens of
        row b go to slots ``start_B[b] ..`` and attend to all slots of the row up to their own (segments are not read).

        Args:
          inputs: tokens, positions and segments of shape ``[*B, T]``; media, whose features take the place of
            embeddings. With a cache, images whose tokens see each other (``image_spans``) are refused.
          cache: keys and values of what came before; needs exactly one leading axis.
          start_B: first slot of each row's new tokens; 0 when omitted.
          blocks: layers from ``blocks`` to run one by one in place of the scan, with a cache for each.
          collect: without a cache, return the keys and values of the tokens as one, with T slots.

        Returns:
          Hidden states ``[*B, T, D]`` and the new cache, of the kind that was given; None when nothing was.
        """
        lead, T = inputs.tokens.shape[:-1], inputs.tokens.shape[-1]
        tokens, positions, segments = (a.reshape(-1, T) for a in (inputs.tokens, inputs.positions, inputs.segments))
        config, media = self.config, inputs.media
        if media is not None and media.positions is not None:
            positions = media.positions.reshape(-1, T, 3)
        spans = None if media is None or media.spans is None else media.spans.reshape(-1, T)
        if spans is not None and cache is not None:
            raise ValueError("tokens of an image see each other without a cache only: prefill with collect=True")
        cos, sin = rope_tables(config, positions)
        if cache is None:
            start_B = None
        elif start_B is None:
            start_B = jnp.zeros(tokens.shape[:1], jnp.int32)
        context = _Context(cos, sin, segments, spans, start_B)
        x = self.embed(tokens)
        if media is not None:
            x = splice(x, self.features(media), media.index.reshape(-1, T))
        x = constrain(x, "rows", None, None)
        if blocks is None:
            assert not isinstance(cache, tuple)
            x, cache = self._scan(x, context, cache, collect)
        else:
            assert not isinstance(cache, Cache)
            x, cache = self._unrolled(blocks, x, context, cache)
        return self.norm(x).reshape(*lead, T, -1), cache

    def _scan(
        self, x: jax.Array, context: _Context, cache: Cache | None, collect: bool
    ) -> tuple[jax.Array, Cache | None]:
        config = self.config
        graph, stacked = nnx.split(self.layers)

        def step(carry, xs):
            x, cache = carry
            params, window, rope, layer = xs
            x, new = nnx.merge(graph, params)(x, context, window, rope, layer, cache)
            return (x, cache if cache is None else new), (new if collect else None)

        if config.remat == "full":
            step = jax.checkpoint(step, prevent_cse=False)
        per_layer = (jnp.asarray(config.window_of_layer), jnp.asarray(config.rope_of_layer), jnp.arange(config.layers))
        (x, cache), fresh = jax.lax.scan(step, (x, cache), (stacked, *per_layer))
        return x, fresh if collect else cache

    def _unrolled(
        self, blocks: tuple[Block, ...], x: jax.Array, context: _Context, caches: tuple[Cache, ...] | None
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        new: list[Cache] = []
        given = caches or (None,) * len(blocks)
        per_layer = zip(blocks, given, self.config.window_of_layer, self.config.rope_of_layer, strict=True)
        for block, cache, window, rope in per_layer:
            x, written = block(x, context, window, rope, jnp.int32(0), cache)
            new.append(written if cache is not None else jax.tree.map(lambda a: a[None], written))
        return x, tuple(new)


class LanguageModel(nnx.Module):
    """Decoder with an output matrix over the vocabulary."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.decoder = Decoder(config)
        if not config.tied:
            self.unembedding = weight((config.vocab, config.hidden), ("vocab", "embed"), config.hidden**-0.5)

    def __call__(
        self,
        inputs: Inputs,
        cache: Cache | tuple[Cache, ...] | None = None,
        start_B: Int[Array, "B"] | None = None,
        blocks: tuple[Block, ...] | None = None,
        *,
        collect: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Hidden states; ``logits`` and ``ops.logprobs`` turn them into scores without keeping ``[T, V]``."""
        return self.decoder(inputs, cache, start_B, blocks, collect=collect)

    def output_matrix(self) -> Float[Array, "V D"]:
        """The matrix that maps hidden states to logits."""
        return self.decoder.embedding[...] if self.config.tied else self.unembedding[...]

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits in float32, soft-capped where the family asks."""
        matrix = self.output_matrix().astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, matrix, preferred_element_type=jnp.float32)
        cap = self.config.final_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


class ScalarModel(nnx.Module):
    """Decoder with a linear head: a critic (value per token) or a reward model (read at the last real token).

    The head has a kernel ``[D, labels]`` and, optionally, a bias. Critic: kernel and bias start at zero. Reward model:
    kernel from N(0, 1/sqrt(D + 1)), bias 0.
    """

    def __init__(self, config: DecoderConfig, *, labels: int = 1, bias: bool = True, head_scale: float = 0.0):
        self.config = config
        self.decoder = Decoder(config)
        self.head = Projection((config.hidden,), (labels,), (None, None), bias=bias, scale=head_scale)

    def __call__(self, inputs: Inputs) -> Float[Array, "*B T Y"]:
        """Head outputs at every token, ``[*B, T, labels]``, float32."""
        hidden, _ = self.decoder(inputs)
        return self.head(hidden.astype(jnp.float32))
