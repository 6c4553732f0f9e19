"""Log-probabilities and entropy of tokens from hidden states, without ever holding ``[T, V]`` logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from yatt_jax.ops.chunks import chunked, joined
from yatt_jax.ops.select import unpack_kept
from yatt_jax.parallel.partition import constrain
from yatt_jax.types import Logprobs, PyTree

_REMOVED = -1e30  # logit of an entry that the filters removed; finite, so that 0 * logit is 0


def logprobs_from_hidden(
    hidden: Float[Array, "*B T D"],
    matrix: Float[Array, "V D"],
    tokens: Int[Array, "*B T"],
    *,
    temperature: Float[Array, ""] | float,
    softcap: float = 0.0,
    kept: UInt8[Array, "*B T V8"] | None = None,
    mask: Float[Array, "*B T"] | None = None,
    capacity: int | None = None,
    chunk: int = 512,
    row_shards: int = 1,
) -> Logprobs:
    """Scores each token under the distribution it was drawn from.

    With ``z = softcap(hidden[t - 1] . matrix) / temperature``, restricted to the kept entries,
    ``logprobs[t] = z[token t] - logsumexp(z)`` and ``entropy[t] = logsumexp(z) - sum(softmax(z) z)``, in float32.

    Logits exist for one chunk of tokens at a time, forward and backward: the derivative recomputes them. It is exact
    for ``hidden`` and ``matrix``; ``temperature`` is taken as a constant.

    Args:
      hidden: hidden states after the final norm.
      matrix: output matrix; products are taken in the dtype of ``hidden`` with float32 sums.
      tokens: token ids.
      temperature: divides the logits; may be traced.
      softcap: logits become ``cap * tanh(z / cap)`` first; 0 is off.
      kept: support of each token as bits, see ``Rollout.kept``. The token itself always counts as kept.
      mask: the tokens that are wanted; others get 0. All but token 0 when omitted.
      capacity: most wanted tokens a row can have. When given with a mask, each row's wanted tokens are gathered first,
        so that the rest (prompts, padding) cost no product with the matrix. A wanted token beyond it gets NaN.
      chunk: tokens whose logits exist at a time on each row shard (at least one of each row).
      row_shards: number of parts the rows are split into over devices; each sums its own share of the matrix's
        gradient, and the shares are added once.

    Returns:
      Scores of shape ``[*B, T]``: value t belongs to token t, 0 at t = 0 and outside the mask.

    Raises:
      ValueError: a chunk or capacity below 1.
    """
    if chunk < 1 or (capacity is not None and capacity < 1):
        raise ValueError(f"chunk = {chunk} and capacity = {capacity} must be at least 1")
    lead, T = tokens.shape[:-1], tokens.shape[-1]
    if T < 2:
        return Logprobs(jnp.zeros(tokens.shape), jnp.zeros(tokens.shape))
    flat = lambda x: x.reshape(math.prod(lead), *x.shape[len(lead) :])  # noqa: E731
    hidden, tokens, kept = flat(hidden), flat(tokens)[:, 1:], None if kept is None else flat(kept)[:, 1:]
    wanted = jnp.ones(tokens.shape, bool) if mask is None else flat(mask)[:, 1:] > 0
    if mask is None or capacity is None:
        capacity, hidden = None, hidden[:, :-1]
    else:
        capacity = min(capacity, T - 1)
        order = jnp.argsort(~wanted, axis=1, stable=True)[:, :capacity]  # wanted tokens first, in their order
        hidden, tokens = _pick(hidden, order), _pick(tokens, order)
        kept = None if kept is None else _pick(kept, order)
    scores: Sequence[jax.Array] = token_scores(
        hidden,
        matrix,
        tokens,
        count=jnp.max(jnp.sum(wanted, axis=1), initial=0) if capacity else tokens.shape[1],
        temperature=temperature,
        softcap=softcap,
        kept=kept,
        chunk=max(1, chunk * row_shards // max(1, tokens.shape[0])),
        row_shards=row_shards,
    )
    if capacity is not None:
        rank = jnp.cumsum(wanted, axis=1) - 1
        place = jnp.clip(rank, 0, capacity - 1)
        scores = [jnp.where(rank < capacity, _pick(x, place), jnp.nan) for x in scores]
    return Logprobs(*(jnp.pad(jnp.where(wanted, x, 0.0), ((0, 0), (1, 0))).reshape(*lead, T) for x in scores))


def token_scores(
    hidden: Float[Array, "B S D"],
    matrix: Float[Array, "V D"],
    tokens: Int[Array, "B S"],
    *,
    count: Int[Array, ""] | int,
    temperature: Float[Array, ""] | float,
    softcap: float = 0.0,
    kept: UInt8[Array, "B S V8"] | None = None,
    chunk: int = 512,
    row_shards: int = 1,
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Log-probability and entropy of tokens whose hidden states stand beside them; see ``logprobs_from_hidden``.

    Args:
      hidden: ``hidden[:, s]`` predicts ``tokens[:, s]``.
      matrix: output matrix.
      tokens: token ids.
      count: how many tokens of every row are wanted, the first ones; may be traced. Chunks beyond cost nothing; what
        stands there is 0, or a score that nobody asked for.
      temperature: divides the logits; may be traced.
      softcap: see there.
      kept: support of each token as bits.
      chunk: tokens of each row whose logits exist at a time.
      row_shards: number of parts the rows are split into over devices.
    """
    scale = jnp.asarray(temperature, jnp.float32)
    matrix = constrain(matrix.astype(hidden.dtype), "act_vocab", None)  # gathered once, and not in every chunk
    shards = row_shards if tokens.shape[0] % row_shards == 0 else 1
    wanted = jnp.asarray(count, jnp.int32)
    return _scores_with_derivative(chunk, shards, softcap, hidden, matrix, tokens, kept, scale, wanted)


def _pick(x: jax.Array, index_BS: jax.Array) -> jax.Array:
    """Entries of each row along its second axis."""
    return jnp.take_along_axis(x, index_BS.reshape(index_BS.shape + (1,) * (x.ndim - 2)), axis=1)


def _trips(parts: PyTree, rows: int, count: jax.Array) -> jax.Array:
    """Chunks that hold the first ``count`` tokens of every row."""
    chunks, size = jax.tree.leaves(parts)[0].shape[:2]
    return jnp.minimum(-(-count // (size // rows)), chunks)


def _logits(
    softcap: float, hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, kept: jax.Array | None, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits of one chunk, where each row's token stands, and the derivative of logits by raw logits."""
    z = jnp.einsum("nd,vd->nv", hidden, matrix, preferred_element_type=jnp.float32)
    z = constrain(z, "rows", "act_vocab")
    slope = 1.0 / scale
    if softcap:
        bent = jnp.tanh(z / softcap)
        z, slope = softcap * bent, (1.0 - bent * bent) / scale
    z = z / scale
    # A comparison and a sum instead of indexing: they stay local where the vocabulary is split over devices.
    hit = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) == tokens[..., None]
    if kept is not None:
        z = jnp.where(unpack_kept(kept, z.shape[-1]) | hit, z, _REMOVED)
    return z, hit, slope


def _scores(
    per_row: int,
    shards: int,
    softcap: float,
    hidden_BSD: jax.Array,
    matrix_VD: jax.Array,
    tokens_BS: jax.Array,
    kept_BSW: jax.Array | None,
    scale: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies ``[B, S]``; ``hidden_BSD[:, s]`` predicts ``tokens_BS[:, s]``."""
    del shards  # of interest to the derivative alone

    def one(xs):
        hidden, tokens, kept = xs
        z, hit, _ = _logits(softcap, hidden, matrix_VD, tokens, kept, scale)
        top = jnp.max(z, axis=-1, keepdims=True)
        e = jnp.exp(z - top)
        total = jnp.sum(e, axis=-1)
        log_total = jnp.log(total)
        logprobs = jnp.sum(jnp.where(hit, z - top, 0.0), axis=-1) - log_total
        return logprobs, log_total - jnp.sum(e * (z - top), axis=-1) / total

    parts = jax.tree.map(lambda x: chunked(x, per_row), (hidden_BSD, tokens_BS, kept_BSW))

    def step(i, so_far):
        found = one(jax.tree.map(lambda x: x[i], parts))
        return tuple(buffer.at[i].set(x) for buffer, x in zip(so_far, found, strict=True))

    nothing = jnp.zeros(parts[1].shape, jnp.float32)
    trips = _trips(parts, tokens_BS.shape[0], count)
    logprobs, entropy = jax.lax.fori_loop(0, trips, step, (nothing, nothing))
    return joined(logprobs, *tokens_BS.shape), joined(entropy, *tokens_BS.shape)


def _scores_forward(per_row, shards, softcap, hidden_BSD, matrix_VD, tokens_BS, kept_BSW, scale, count):
    logprobs, entropy = _scores(per_row, shards, softcap, hidden_BSD, matrix_VD, tokens_BS, kept_BSW, scale, count)
    return (logprobs, entropy), (hidden_BSD, matrix_VD, tokens_BS, kept_BSW, scale, count, logprobs, entropy)


def _scores_backward(per_row, shards, softcap, saved, cotangents):
    """With p = softmax(z) and H the entropy: d logprob / dz = hit - p, and dH / dz = -p (log p + H)."""
    hidden_BSD, matrix_VD, tokens_BS, kept_BSW, scale, count, logprobs_BS, entropy_BS = saved

    def step(i, so_far):
        d_matrix_RVD, d_hiddens = so_far
        xs = jax.tree.map(lambda x: x[i], parts)
        hidden, tokens, kept, logprobs, entropy, d_logprobs, d_entropy = xs
        z, hit, slope = _logits(softcap, hidden, matrix_VD, tokens, kept, scale)
        # log p without a second reduction: the token's own logit minus its log-probability is logsumexp(z).
        at_token = jnp.sum(jnp.where(hit, z, 0.0), axis=-1)
        log_p = z - (at_token - logprobs)[..., None]
        p = jnp.exp(log_p)
        dz = d_logprobs[..., None] * (hit - p) - d_entropy[..., None] * p * (log_p + entropy[..., None])
        dz = (dz * slope).astype(hidden.dtype)
        d_hidden = dz @ matrix_VD
        dz, hidden = (x.reshape(shards, -1, *x.shape[1:]) for x in (dz, hidden))
        share_RVD = jnp.einsum("rnv,rnd->rvd", dz, hidden, preferred_element_type=jnp.float32)
        return constrain(d_matrix_RVD + share_RVD, "rows", "act_vocab", None), d_hiddens.at[i].set(d_hidden)

    per_token = (hidden_BSD, tokens_BS, kept_BSW, logprobs_BS, entropy_BS, *cotangents)
    parts = jax.tree.map(lambda x: chunked(x, per_row), per_token)
    start = constrain(jnp.zeros((shards, *matrix_VD.shape), jnp.float32), "rows", "act_vocab", None)
    trips = _trips(parts, tokens_BS.shape[0], count)
    d_matrix_RVD, d_hidden = jax.lax.fori_loop(0, trips, step, (start, jnp.zeros_like(parts[0])))
    d_matrix = jnp.sum(d_matrix_RVD, axis=0)
    d_hidden = joined(d_hidden, *tokens_BS.shape)
    return d_hidden, d_matrix.astype(matrix_VD.dtype), None, None, jnp.zeros_like(scale), None


_scores_with_derivative = jax.custom_vjp(_scores, nondiff_argnums=(0, 1, 2))
_scores_with_derivative.defvjp(_scores_forward, _scores_backward)
