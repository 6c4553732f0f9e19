"""A reward model's or a critic's outputs for token sequences, by programs compiled before the first request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from yatt_jax.models.build import Model
from yatt_jax.parallel.partition import Partition
from yatt_jax.types import Inputs, Params

_SHORTEST = 32


class ScoreModel:
    """Scores token sequences.

    Rows are padded to one of few lengths (each twice the one before) and one of few numbers (each four times), so that
    the programs for all of them can be compiled at the start.

    Args:
      model: with a scalar head.
      params: its weights, in the partition.
      partition: of the devices.
      rows: most rows of a call.
      tokens: longest row.
      observe: told of each program's call its tokens and its padding.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        partition: Partition,
        *,
        rows: int,
        tokens: int,
        observe: Callable[[int, int], None] = lambda tokens, padding: None,
    ) -> None:
        self._params, self._partition, self._observe = params, partition, observe
        shards = partition.row_shards
        self.rows = -(-rows // shards) * shards
        self.counts = _steps(shards, self.rows, 4)
        self.lengths = _steps(min(_SHORTEST, -(-tokens // 16) * 16), -(-tokens // 16) * 16, 2)

        def outputs(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            with partition.active():
                index = jax.numpy.arange(tokens.shape[1])[None, :]
                real = index < lengths[:, None]
                inputs = Inputs(tokens, jax.numpy.where(real, index, 0), real.astype(jax.numpy.int32))
                return model.bind(params)(inputs)

        self._outputs = jax.jit(outputs, out_shardings=partition.replicated)

    def compile(self) -> None:
        """Compiles every program."""
        for count, length in itertools.product(self.counts, self.lengths):
            jax.block_until_ready(self._call(np.zeros((count, length), np.int32), np.ones(count, np.int32)))

    def __call__(self, rows: Sequence[Int[np.ndarray, "T"]]) -> list[Float[np.ndarray, "T Y"]]:
        """The head's outputs at each token of each row, in order.

        Args:
          rows: token ids, at least one and at most ``tokens`` each.
        """
        by_length: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            by_length.setdefault(next(size for size in self.lengths if size >= len(row)), []).append(place)
        found: dict[int, np.ndarray] = {}
        for length, places in by_length.items():
            for first in range(0, len(places), self.rows):
                some = places[first : first + self.rows]
                count = next(size for size in self.counts if size >= len(some))
                tokens, lengths = np.zeros((count, length), np.int32), np.ones(count, np.int32)
                for i, place in enumerate(some):
                    tokens[i, : len(rows[place])] = rows[place]
                    lengths[i] = len(rows[place])
                outputs = np.asarray(self._call(tokens, lengths))
                found |= {place: outputs[i, : lengths[i]] for i, place in enumerate(some)}
                real = int(lengths[: len(some)].sum())
                self._observe(real, tokens.size - real)
        return [found[place] for place in range(len(rows))]

    def _call(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        lie = self._partition.rows
        return self._outputs(self._params, *jax.device_put((tokens, lengths), (lie, lie)))


def _steps(first: int, last: int, factor: int) -> list[int]:
    """``first``, and each ``factor`` times the one before, up to ``last``."""
    sizes = list(itertools.takewhile(lambda size: size < last, (first * factor**i for i in range(64))))
    return [*sizes, last]
