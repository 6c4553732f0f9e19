"""Attention over the cache on TPUs: a Pallas kernel for decode steps and for prompts that are prefilled in pieces.

Flash decoding (Dao et al. 2023) over the dense cache ``[L, B, J, S, K]``: a program per row and block of queries walks
the blocks of places that its queries see, from the window's first to its last, and fetches no other. The kernel takes
the cache of all layers and the layer's number, so that no layer is copied out of the stack at each step.

The ragged paged kernel that comes with jax is not used: it wants keys and values interleaved by head within a place,
``[pages, page, 2 J, K]``, and a whole cache turned into that layout at every step costs more than attention does.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from yatt_jax.ops.attention import HIDDEN, Cached

_LANES = 128
# What a program holds in fast memory, of which TPUs give it 16 MiB unasked.
_KEY_BYTES = 2**20  # of a block of keys; it holds four of these, keys and values being fetched a block ahead
_QUERY_BYTES = 2**19  # of a block of queries; four of these, and two or more of sums in float32
_LOGITS = 2**18  # of one head in float32, and as many weights
_QUERIES = 64  # tokens of a block of queries
_TILE = 16  # rows of a tile


def cached(
    q_BTHK: Float[Array, "B T H K"],
    keys: Array,
    values: Float[Array, "L B J S K"],
    seen: Cached,
    *,
    window: int | Int[Array, ""],
    scale: float,
    softcap: float,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """``attention.plain`` for a cache, with the same arguments; without a derivative.

    ``interpret`` runs the kernel's program on any platform, slowly.
    """
    B, T, H, K = q_BTHK.shape
    J, S = values.shape[2:4]
    G = H // J
    tokens = tokens_of_blocks(T, H * K * q_BTHK.dtype.itemsize)
    side = side_of_blocks(S, J * K * values.dtype.itemsize, G * tokens)
    N, rows = pl.cdiv(T, tokens), G * tokens
    q = jnp.pad(q_BTHK, ((0, 0), (0, N * tokens - T), (0, 0), (0, 0)))
    q_BJRK = q.reshape(B, N, tokens, J, G, K).transpose(0, 3, 1, 4, 2, 5).reshape(B, J, N * rows, K)

    def places(b: jax.Array, n: jax.Array, start: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last block that the queries of block n see; the last is -1 for a row past the end."""
        lowest = start[b] + n * tokens
        # Not //: the signs that it looks at would be lowered for the device at hand, and not the one compiled for.
        first = jax.lax.div(jnp.where(window[0] > 0, jnp.maximum(lowest - window[0] + 1, 0), 0), side)
        last = jax.lax.div(jnp.minimum(lowest + tokens - 1, S - 1), side)
        return jnp.minimum(first, pl.cdiv(S, side) - 1), jnp.where(lowest < S, last, -1)

    def block(b, n, s, layer, start, window):
        first, last = places(b, n, start, window)
        return jnp.minimum(first + s, jnp.maximum(last, first))

    def of_values(b, n, s, layer, start, window):
        return layer[0], b, 0, block(b, n, s, layer, start, window), 0

    def of_keys_places_last(b, n, s, layer, start, window):
        return layer[0], b, 0, 0, block(b, n, s, layer, start, window)

    by_query = pl.BlockSpec((None, J, rows, K), lambda b, n, s, *_: (b, 0, n, 0))
    by_place = pl.BlockSpec((None, None, J, side, K), of_values)
    turned = pl.BlockSpec((None, None, J, K, side), of_keys_places_last)
    kernel = functools.partial(
        _kernel,
        places=places,
        places_last=seen.places_last,
        slots=S,
        side=side,
        tokens=tokens,
        scale=scale,
        softcap=softcap,
    )
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, N, pl.cdiv(S, side)),
            in_specs=[by_query, turned if seen.places_last else by_place, by_place],
            out_specs=by_query,
            scratch_shapes=[
                pltpu.VMEM((J, rows, _LANES), jnp.float32),
                pltpu.VMEM((J, rows, _LANES), jnp.float32),
                pltpu.VMEM((J, rows, K), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BJRK.shape, q_BJRK.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="attention_cache",
    )(_scalar(seen.layer), seen.start.astype(jnp.int32), _scalar(window), q_BJRK, keys, values)
    out = out.reshape(B, J, N, G, tokens, K).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(B, N * tokens, H, K)[:, :T]


def tokens_of_blocks(tokens: int, bytes_of_a_token: int) -> int:
    """Tokens in a block of queries: a power of two of at least a tile, so that a row's low bits are its token, or 1."""
    if tokens == 1:
        return 1
    most = _QUERY_BYTES // bytes_of_a_token
    while (size := min(_QUERIES, pl.next_power_of_2(tokens))) > max(most, _TILE):
        tokens = size // 2
    return max(size, _TILE)


def side_of_blocks(slots: int, bytes_of_a_place: int, rows: int) -> int:
    """Places in a block: all of a short cache, else a multiple of a tile that divides it, and fits, where one does."""
    most = min(_KEY_BYTES // bytes_of_a_place, _LOGITS // rows)
    most = max(_LANES, most // _LANES * _LANES)
    if slots <= most:
        return slots
    dividing = [side for side in range(_LANES, most + 1, _LANES) if slots % side == 0]
    return dividing[-1] if dividing and dividing[-1] * 4 >= most else most


def _scalar(x: int | jax.Array) -> jax.Array:
    return jnp.asarray(x, jnp.int32).reshape(1)


def _kernel(
    layer_ref,
    start_ref,
    window_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    top_ref,
    total_ref,
    sum_ref,
    *,
    places,
    places_last: bool,
    slots: int,
    side: int,
    tokens: int,
    scale: float,
    softcap: float,
) -> None:
    b, n, s = (pl.program_id(axis) for axis in range(3))
    first, last = places(b, n, start_ref, window_ref)
    J, rows, _ = q_ref.shape

    @pl.when(s == 0)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, HIDDEN, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @pl.when(first + s <= last)
    def _():
        place = (first + s) * side + jax.lax.broadcasted_iota(jnp.int32, (rows, side), 1)
        token = jax.lax.broadcasted_iota(jnp.int32, (rows, side), 0) & (tokens - 1)
        query = start_ref[b] + n * tokens + token
        window = window_ref[0]
        mask = (place <= query) & (query < slots) & ((place > query - window) | (window == 0))
        for j in range(J):
            q, k, v = q_ref[j], k_ref[j].astype(q_ref.dtype), v_ref[j].astype(q_ref.dtype)
            if slots % side:  # what the last block reads past the end is anything, NaN as well
                here = (first + s) * side + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
                v = jnp.where(here < slots, v, jnp.zeros_like(v))
            over = (((1,), (0,)), ((), ())) if places_last else (((1,), (1,)), ((), ()))
            logits = jax.lax.dot_general(q, k, over, preferred_element_type=jnp.float32) * scale
            if softcap:
                logits = softcap * jnp.tanh(logits / softcap)
            logits = jnp.where(mask, logits, HIDDEN)
            top = top_ref[j][:, :1]
            new = jnp.maximum(top, jnp.max(logits, axis=1, keepdims=True))
            weights = jnp.where(mask, jnp.exp(logits - new), 0.0)
            decay = jnp.exp(top - new)
            total = decay * total_ref[j][:, :1] + jnp.sum(weights, axis=1, keepdims=True)
            add = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            sum_ref[j] = decay * sum_ref[j] + add
            top_ref[j], total_ref[j] = (jnp.broadcast_to(x, (rows, _LANES)) for x in (new, total))

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        for j in range(J):
            total = total_ref[j][:, :1]
            out_ref[j] = jnp.where(total > 0, sum_ref[j] / jnp.where(total > 0, total, 1.0), 0.0).astype(out_ref.dtype)
