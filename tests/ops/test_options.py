from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from yatt_jax.ops.options import Count, CountOrZero, Finite, NotNegative, Positive, Share, check


@dataclasses.dataclass(frozen=True)
class Options:
    kind: Literal["a", "b"] = "a"
    on: bool = False
    share: Share = 0.5
    positive: Positive = 1.0
    not_negative: NotNegative = 0.0
    finite: Finite = -3.0
    count: Count = 1
    count_or_zero: CountOrZero = 0
    free: Any = None

    def __post_init__(self) -> None:
        check(self, (not (self.on and self.kind == "b"), "on does not go with kind = 'b'"))


def test_defaults_and_whole_numbers_for_floats_pass():
    Options()
    Options(share=1, positive=2, finite=0, kind="b")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kind", "c", "kind = 'c': expected one of ['a', 'b']"),
        ("on", 1, "on = 1: expected True or False"),
        ("share", 1.5, "share = 1.5: must be at least 0 and at most 1"),
        ("share", -0.1, "share = -0.1"),
        ("share", "x", "share = 'x': expected a number"),
        ("share", True, "share = True: expected a number"),
        ("positive", 0.0, "positive = 0.0: must be above 0"),
        ("not_negative", -1.0, "not_negative = -1.0: must be at least 0"),
        ("not_negative", float("inf"), "not_negative = inf"),
        ("finite", float("nan"), "finite = nan"),
        ("count", 0, "count = 0: must be at least 1"),
        ("count", 2.0, "count = 2.0: expected a whole number"),
        ("count_or_zero", -1, "count_or_zero = -1"),
    ],
)
def test_faults_name_the_key(key, value, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Options(**{key: value})
    assert message in str(error.value)


def test_every_fault_is_named_at_once():
    with pytest.raises(ValueError, match=r"share = 2: .*; count = 0: .*; on does not go"):
        Options(share=2, count=0, on=True, kind="b")
