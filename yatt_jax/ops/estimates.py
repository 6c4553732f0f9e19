"""Estimates from several responses to one prompt, on the host: how many attempts solve it, what most of them say."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float


def pass_at(n: int, right: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)``: the chance that at least one of k responses is right, without bias.

    Source: Chen et al. 2021, "Evaluating large language models trained on code", equation 1. Of 4 responses with 1
    right one, pass@1 is .25, pass@2 .5 and pass@4 1.

    Args:
      n: responses there are, at least k.
      right: how many of them are right, c.
      k: attempts.
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right ones among {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[Hashable | None], right: Sequence[float]) -> float:
    """Whether the answer that most responses give is right; of answers given equally often, the mean.

    Source: Wang et al. 2023, "Self-consistency".

    Args:
      answers: of each response; None for one that gives none, which does not vote.
      right: 1 for a right response, else 0.

    Returns:
      From 0 to 1; 0 where nothing votes.
    """
    votes: dict[Hashable, list[float]] = {}
    for answer, value in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(value)
    most = max(map(len, votes.values()), default=0)
    first = [sum(values) / most for values in votes.values() if len(values) == most]
    return sum(first) / len(first) if first else 0.0


def win_share(own: Float[np.ndarray, "G"], other: Float[np.ndarray, "H"]) -> float:
    """The chance that a response of one's own scores higher than one of the other's, a tie counting half.

    Over all pairs (Mann and Whitney 1947); NaN scores do not count, and NaN is the result where one side has none left.
    """
    own, other = own[np.isfinite(own)], other[np.isfinite(other)]
    if not len(own) or not len(other):
        return math.nan
    return float(np.mean(0.5 + 0.5 * np.sign(own[:, None] - other[None, :])))


def attempts(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two below the number of responses, and that number."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples})
