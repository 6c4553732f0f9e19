"""Sampling parameters are checked where they are written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from yatt_jax.rollout.sampling import MAX_STOP_IDS, Sampling


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-5),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_new_tokens", -1),
        ("min_new_tokens", 65),
        ("max_new_tokens", 0),
        ("stop", ("a", "")),
        ("stop", "ab"),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(MAX_STOP_IDS + 1))),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"sampling.{key} = "):
        Sampling(**{key: value})


def test_values_at_the_edges_are_taken() -> None:
    Sampling(temperature=0, top_p=1e-6, min_p=1.0, min_new_tokens=64, stop_token_ids=tuple(range(MAX_STOP_IDS)))
    sampling = Sampling(stop=["a"], stop_token_ids=[2, 3])  # pyright: ignore[reportArgumentType]
    assert sampling.stop == ("a",)
    assert sampling.stop_token_ids == (2, 3)
    assert hash(sampling) == hash(dataclasses.replace(sampling))
