"""Choosing the next token: filters over the vocabulary, an exact draw, and the support that survived, as bits.

Nothing here sorts the vocabulary or draws a random number for each of its entries. A token takes two uniforms, and the
draw inverts the cumulative distribution in two levels: which block of entries, then which entry of it. Filters are
thresholds on the logits, found by bisection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

# Entries of a block: a vector register row on every platform, and near the square root of common vocabularies.
BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filters:
    """How each row's distribution is shaped, in this order: temperature, top-k, top-p, min-p. All are traced values.

    Attributes:
      temperature: logits are divided by it; 0 takes the largest logit, and the filters below have no effect.
      top_k: keep the k largest logits; 0 keeps all.
      top_p: keep the largest probabilities until their sum reaches p (Holtzman et al. 2020); 1 keeps all.
      min_p: keep probabilities of at least min_p times the largest (Nguyen et al. 2024); 0 keeps all.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """What ``select`` drew.

    Attributes:
      token: the entry; meaningless where not ``valid``.
      sampled_logprob: under exactly the distribution drawn from; 0 at temperature 0 and where not ``valid``.
      plain_logprob: under the temperature alone (1 at temperature 0), without filters and bans.
      valid: False where a logit is NaN or +inf, or no entry is left to draw.
      kept: the entries that could have been drawn, packed by ``pack_kept``; None unless recorded.
    """

    token: Int[Array, "B"]
    sampled_logprob: Float[Array, "B"]
    plain_logprob: Float[Array, "B"]
    valid: Bool[Array, "B"]
    kept: UInt8[Array, "B V8"] | None


def row_keys(seed_words: UInt32[Array, "2"], sample_id: Int[Array, "B"]) -> UInt32[Array, "B 2"]:
    """The random key of each sample: a function of (seed, sample id) alone.

    Args:
      seed_words: high and low 32 bits of the seed.
      sample_id: number of the sample.
    """
    seed_key = jax.random.wrap_key_data(seed_words, impl="threefry2x32")
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(seed_key, i)))(sample_id)


def uniforms(keys: UInt32[Array, "B 2"], position: Int[Array, "B"]) -> Float[Array, "B 2"]:
    """Two uniforms in [0, 1) for the token at ``position`` of each row, on a grid of 2^-24."""

    def words(key: jax.Array, at: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), at)
        return jax.random.bits(token_key, (2,), jnp.uint32)

    return (jax.vmap(words)(keys, position) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def select(
    logits: Float[Array, "B V"],
    filters: Filters,
    banned: Int[Array, "B S"],
    uniform: Float[Array, "B 2"],
    *,
    record_kept: bool = False,
) -> Choice:
    """Draws one token a row.

    The probability of entry v is ``exp(x_v / temperature) / sum over kept w of exp(x_w / temperature)`` if v is kept,
    else 0; an entry of probability 0 is never drawn. Entries that tie with the last one kept by a filter are kept too.
    A row with a NaN or +inf logit is reported as not valid; it does not disturb the others.

    Args:
      logits: scores x, float32; -inf is an entry that cannot be drawn.
      filters: temperature and filters of each row.
      banned: entries that may not be drawn; V or more is none.
      uniform: two numbers in [0, 1) a row.
      record_kept: return the support as bits; a static choice.
    """
    vocab = logits.shape[-1]
    # The thresholds below are compared with these very bits: they must not be recomputed inside each consumer.
    x_BNK = jax.lax.optimization_barrier(_blocks(logits))
    greedy = filters.temperature == 0
    scale = jnp.where(greedy, 1.0, filters.temperature)
    maxima_BN = jnp.max(x_BNK, axis=2)
    top = jnp.max(maxima_BN, axis=1)
    sums_BN = jnp.sum(_weights(x_BNK, top, scale), axis=2)
    plain_total = jnp.sum(sums_BN, axis=1)

    def unfiltered() -> _Shaped:
        return _Shaped(jnp.full_like(top, -jnp.inf), top, maxima_BN, sums_BN)

    def filtered() -> _Shaped:
        y_BNK = _put(x_BNK, banned, -jnp.inf)
        maxima_BN = jnp.max(y_BNK, axis=2)
        best = jnp.max(maxima_BN, axis=1)
        floor = _floor(y_BNK, filters, greedy, scale, best)
        weights = jnp.where(y_BNK > floor[:, None, None], _weights(y_BNK, best, scale), 0.0)
        return _Shaped(floor, best, maxima_BN, jnp.sum(weights, axis=2))

    filters_on = jnp.any(~greedy & (_has_top_k(filters, vocab) | (filters.top_p < 1) | (filters.min_p > 0)))
    shaped = jax.lax.cond(filters_on | jnp.any(banned < vocab), filtered, unfiltered)
    total = jnp.sum(shaped.sums_BN, axis=1)
    valid = jnp.isfinite(top) & jnp.isfinite(plain_total) & jnp.isfinite(shaped.best) & jnp.isfinite(total)

    index, drawn = _draw(x_BNK, shaped, banned, greedy, scale, uniform)
    token = jnp.minimum(index, vocab - 1).astype(jnp.int32)
    sampled = jnp.where(greedy, 0.0, (drawn - shaped.best) / scale - jnp.log(total))
    plain = (drawn - top) / scale - jnp.log(plain_total)
    kept = None
    if record_kept:
        kept_BNK = _put(x_BNK > shaped.floor[:, None, None], banned, False)
        only = jnp.arange(kept_BNK[0].size).reshape(kept_BNK[0].shape) == token[:, None, None]
        kept_BNK = jnp.where(greedy[:, None, None], only, kept_BNK)
        kept = pack_kept(kept_BNK.reshape(kept_BNK.shape[0], -1)[:, :vocab])
    return Choice(token, jnp.where(valid, sampled, 0.0), jnp.where(valid, plain, 0.0), valid, kept)


def pack_kept(kept: Bool[Array, "*B V"]) -> UInt8[Array, "*B V8"]:
    """Packs a mask over the vocabulary into bytes: entry v is bit ``v % 8`` (little-endian) of byte ``v // 8``.

    The last byte is filled with zeros, so ``V8 = ceil(V / 8)``.
    """
    missing = -kept.shape[-1] % 8
    bits = jnp.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(0, missing)]).reshape(*kept.shape[:-1], -1, 8)
    # The eight terms are distinct bits: their sum is their union and stays within a byte.
    return jnp.sum(bits.astype(jnp.uint8) << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def unpack_kept(kept: UInt8[Array, "*B V8"], vocab: int) -> Bool[Array, "*B V"]:
    """The mask over the vocabulary that ``pack_kept`` packed.

    Args:
      kept: bytes, ``ceil(vocab / 8)`` on the last axis.
      vocab: number of vocabulary entries.

    Raises:
      ValueError: a last axis that does not fit the vocabulary.
    """
    width = -(-vocab // 8)
    if kept.shape[-1] != width:
        raise ValueError(f"kept has {kept.shape[-1]} bytes on its last axis; a vocabulary of {vocab} takes {width}")
    bits = (kept[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & jnp.uint8(1)
    return bits.reshape(*kept.shape[:-1], -1)[..., :vocab] != 0


class _Shaped(NamedTuple):
    """The distribution to draw from: entries above ``floor`` that are not banned.

    ``best`` is the largest entry that is not banned, ``maxima_BN`` the largest of each block, and ``sums_BN`` the
    weight of each block, relative to ``best``.
    """

    floor: jax.Array
    best: jax.Array
    maxima_BN: jax.Array
    sums_BN: jax.Array


def _draw(
    x_BNK: jax.Array, shaped: _Shaped, banned: jax.Array, greedy: jax.Array, scale: jax.Array, uniform: jax.Array
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Picks a block, then an entry of it; returns the entry's index and its logit."""
    block = jnp.where(greedy, jnp.argmax(shaped.maxima_BN, axis=1), _invert(shaped.sums_BN, uniform[:, 0]))
    x_BK = jnp.take_along_axis(x_BNK, block[:, None, None], axis=1)[:, 0]
    ids_BK = block[:, None] * BLOCK + jnp.arange(BLOCK)
    allowed = (x_BK > shaped.floor[:, None]) & ~jnp.any(ids_BK[:, :, None] == banned[:, None, :], axis=2)
    x_BK = jnp.where(allowed, x_BK, -jnp.inf)
    inside = _invert(_weights(x_BK, shaped.best, scale), uniform[:, 1])
    # Where every weight of the block rounds to 0, its largest entry stands for it.
    drawn = jnp.take_along_axis(x_BK, inside[:, None], axis=1)[:, 0]
    inside = jnp.where(greedy | (drawn == -jnp.inf), jnp.argmax(x_BK, axis=1), inside)
    drawn = jnp.take_along_axis(x_BK, inside[:, None], axis=1)[:, 0]
    return block * BLOCK + inside, drawn


def _blocks(x: Float[Array, "B V"]) -> Float[Array, "B N K"]:
    """The vocabulary in blocks; the last is filled with -inf."""
    missing = -x.shape[1] % BLOCK
    x = x.astype(jnp.float32)
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return x.reshape(x.shape[0], -1, BLOCK)


def _weights(x: jax.Array, top_B: jax.Array, scale_B: jax.Array) -> jax.Array:
    """``exp((x - top) / scale)``: probabilities up to their sum."""
    shape = (-1,) + (1,) * (x.ndim - 1)
    return jnp.exp((x - top_B.reshape(shape)) / scale_B.reshape(shape))


def _invert(weights_BN: Float[Array, "B N"], u_B: Float[Array, "B"]) -> Int[Array, "B"]:
    """The first index whose cumulative weight exceeds ``u * total``; never one of weight 0 if there is another.

    A parallel cumulative sum need not be monotone in floating point, so the weight itself is checked; and ``u * total``
    may round up to the total, so the last positive weight stands in where nothing exceeds it.
    """
    cumulative = jnp.cumsum(weights_BN, axis=1)
    positive = weights_BN > 0
    hit = positive & (cumulative > (u_B * cumulative[:, -1])[:, None])
    last = weights_BN.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=1)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), last)


def _put(x_BNK: jax.Array, ids_BS: Int[Array, "B S"], value: float | bool) -> jax.Array:
    """Sets entries of each row; ids past the vocabulary are none. By row, so that split rows stay where they are."""
    put = jax.vmap(lambda x, ids: x.at[ids // BLOCK, ids % BLOCK].set(value, mode="drop"))
    return put(x_BNK, ids_BS)


def _has_top_k(filters: Filters, vocab: int) -> Bool[Array, "B"]:
    return (filters.top_k > 0) & (filters.top_k < vocab)


def _floor(
    x_BNK: jax.Array, filters: Filters, greedy: jax.Array, scale: jax.Array, top: jax.Array
) -> Float[Array, "B"]:
    """The threshold of all filters together: entries strictly above it are kept."""
    _, N, K = x_BNK.shape
    usable = jnp.isfinite(top) & ~greedy
    none = jnp.full_like(top, -jnp.inf)
    just_below = _below(top)

    def by_top_k() -> jax.Array:
        # Every block has an entry at or above the smallest block maximum: a first bound where k is at most N.
        smallest = _below(jnp.min(jnp.max(x_BNK, axis=2), axis=1))
        low = jnp.where(filters.top_k <= N, smallest, -jnp.inf)
        active = usable & _has_top_k(filters, N * K)
        count = lambda t: jnp.sum((x_BNK > t[:, None, None]).astype(jnp.float32), axis=(1, 2))  # noqa: E731
        one_left = lambda low, above_low, above_high: above_low - above_high <= 1  # noqa: E731
        return jnp.where(active, _search(count, filters.top_k.astype(jnp.float32), low, top, active, one_left), none)

    floor = jax.lax.cond(jnp.any(_has_top_k(filters, N * K)), by_top_k, lambda: none)

    def by_top_p() -> jax.Array:
        weights = jnp.where(x_BNK > floor[:, None, None], _weights(x_BNK, top, scale), 0.0)
        weights = jax.lax.optimization_barrier(weights)
        active = usable & (filters.top_p < 1)
        mass = lambda t: jnp.sum(jnp.sum(jnp.where(weights > t[:, None, None], weights, 0.0), axis=2), axis=1)  # noqa: E731
        # Entries between the bounds weigh more than low each: less than twice that is a single one.
        one_left = lambda low, above_low, above_high: above_low - above_high < 2 * low  # noqa: E731
        zero, one = jnp.zeros_like(top), jnp.ones_like(top)
        low = _search(mass, filters.top_p * mass(zero), zero, one, active, one_left)
        below = jnp.max(jnp.where(weights <= low[:, None, None], x_BNK, -jnp.inf), axis=(1, 2))
        return jnp.where(active, jnp.maximum(below, floor), floor)

    floor = jax.lax.cond(jnp.any(filters.top_p < 1), by_top_p, lambda: floor)
    by_min_p = _below(top + scale * jnp.log(filters.min_p))
    floor = jnp.where(usable & (filters.min_p > 0), jnp.maximum(floor, by_min_p), floor)
    return jnp.where(usable, jnp.minimum(floor, just_below), none)


def _search(
    measure_above: Callable[[jax.Array], jax.Array],
    target: Float[Array, "B"],
    low: Float[Array, "B"],
    high: Float[Array, "B"],
    active: Bool[Array, "B"],
    one_left: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> Float[Array, "B"]:
    """Finds t such that the entries strictly above it are those with less than ``target`` measured above themselves.

    Bisects between ``low`` (too much lies above it) and ``high`` (too little), by value and by bit pattern in turn: the
    first is quick where logits are spread evenly, the second bounds the number of steps. A row is done when one entry
    lies in (low, high], or when no float lies between.

    Args:
      measure_above: sum of what lies strictly above a threshold, by row.
      target: what must be reached.
      low: a lower bound; if less than the target lies above it, it is the answer.
      high: an upper bound, not below the largest entry.
      active: rows to search; the others return ``low``.
      one_left: whether the measures above low and high show that a single entry is between them.
    """

    def finished(low: jax.Array, high: jax.Array, above_low: jax.Array, above_high: jax.Array) -> jax.Array:
        adjacent = _ordered(high) <= _ordered(low) + 1  # the difference of the two could overflow
        return adjacent | one_left(low, above_low, above_high)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, low, high, above_low, above_high, done = state
        middle = low / 2 + high / 2
        low_bits, high_bits = _ordered(low), _ordered(high)
        pattern = _float((low_bits >> 1) + (high_bits >> 1) + (low_bits & high_bits & 1))
        use_pattern = (i % 2 == 1) | ~((low < middle) & (middle < high))
        middle = jnp.where(use_pattern, pattern, middle)
        above = measure_above(middle)
        up = ~done & (above >= target)
        down = ~done & (above < target)
        low, above_low = jnp.where(up, middle, low), jnp.where(up, above, above_low)
        high, above_high = jnp.where(down, middle, high), jnp.where(down, above, above_high)
        return i + 1, low, high, above_low, above_high, done | finished(low, high, above_low, above_high)

    above_low, above_high = measure_above(low), jnp.zeros_like(target)
    done = ~active | (above_low < target) | finished(low, high, above_low, above_high)
    state = (jnp.int32(0), low, high, above_low, above_high, done)
    return jax.lax.while_loop(lambda s: ~jnp.all(s[-1]), step, state)[1]


def _below(x: Float[Array, "B"]) -> Float[Array, "B"]:
    """The next lower number that compares as lower: hardware may take denormal numbers for 0."""
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.where(jnp.abs(x) < tiny, -tiny, jnp.nextafter(x, jnp.full_like(x, -jnp.inf)))


def _ordered(x: Float[Array, "B"]) -> Int[Array, "B"]:
    """Bits of a float32 as an int32 that orders as the float does."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _float(ordered: Int[Array, "B"]) -> Float[Array, "B"]:
    return jax.lax.bitcast_convert_type(ordered ^ ((ordered >> 31) & 0x7FFFFFFF), jnp.float32)
