"""Sums and means over documents, of which a row may hold several: which tokens count, and how long each document is."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.types import Inputs, Metrics, Ratio, TextRows, TopKRows

Texts = TypeVar("Texts", TextRows, TopKRows)


def trained_tokens(inputs: Inputs, mask: Float[Array, "B *P T"], weight: Float[Array, "B"]) -> Float[Array, "B *P T"]:
    """The mask without what can not or must not be trained: first tokens of documents, rows of padding.

    The first token of a document has nothing before it that predicts it; in a packed row its log-probability would be
    read from the end of another document.

    Args:
      inputs: the rows; leading axes after the first (the two texts of a pair) share a weight.
      mask: 1 at tokens that are wanted.
      weight: 0 for rows of padding.
    """
    real = (weight > 0).reshape(-1, *[1] * (mask.ndim - 1))
    return jnp.where(real & (inputs.positions > 0) & (inputs.segments > 0), mask, 0.0)


def trained_rows(rows: Texts) -> tuple[Texts, Metrics]:
    """Packed texts with ``trained_tokens`` for their mask; ``trained`` is the share of their tokens that count."""
    mask = trained_tokens(rows.inputs, rows.mask, rows.weight)
    real = (rows.inputs.segments > 0) & (rows.weight > 0)[:, None]
    return dataclasses.replace(rows, mask=mask), {"trained": masked_ratio(mask, real.astype(jnp.float32))}


def document_counts(mask: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """At each token, how many tokens of its document the mask counts."""
    T = mask.shape[-1]

    def row(mask_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(mask_T, segments_T, T + 1)[segments_T]

    return jax.vmap(row)(mask, segments)


def aggregate_documents(
    x: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    weight: Float[Array, "B"],
    options: Aggregation,
) -> Ratio:
    """``ops.aggregate.aggregate`` over documents in place of rows, so that packing changes nothing.

    With w the weight of the row that a document is in, n_d its tokens that count, and W the sum of w over documents
    that have any:

    - ``token_mean``: ``sum w x / sum_d w n_d``
    - ``sequence_mean``: ``sum_d w (sum_t x / n_d) / W``
    - ``sequence_sum``: ``sum w x / W``
    - ``fixed_length``: ``sum w x / (W length)``

    Args:
      x: token losses; what stands outside the mask does not matter.
      mask: 1 at tokens that count.
      segments: document of each token, see ``Inputs``.
      weight: of each row.
      options: which of them.
    """
    tokens = mask * weight[:, None]
    share = tokens / jnp.maximum(document_counts(mask, segments), 1.0)  # adds up to w over a document
    documents = jnp.sum(share)
    each = share if options.how == "sequence_mean" else tokens
    total = masked_sum(x * each, each)
    if options.how == "token_mean":
        return Ratio(total, jnp.sum(tokens))
    return Ratio(total, documents * options.length if options.how == "fixed_length" else documents)
