"""Labels that rate texts by attributes."""

from __future__ import annotations

import pytest

from yatt_jax.data.attributes import ATTRIBUTES, condition, format_label, parse_label, rating_vector
from yatt_jax.data.config import DataError


def test_labels_go_both_ways():
    assert parse_label("quality:4, humor:0.5") == {"quality": 4.0, "humor": 0.5}
    assert format_label({"humor": 0.5, "mood": 1, "quality": 4}) == "quality:4,humor:0.5,mood:1"
    label = ",".join(f"{name}:{i}" for i, name in enumerate(ATTRIBUTES))
    assert format_label(parse_label(label)) == label
    assert condition("quality:4") == "quality:4\n"


def test_the_order_of_a_regression_label():
    vector = rating_vector({"quality": 4, "verbosity": 1, "helpfulness": 2})
    assert vector == (4, -100, -100, -100, 2, -100, -100, -100, 1)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("quality", "found 'quality'"),
        ("quality:", "found 'quality:'"),
        (":4", "found ':4'"),
        ("quality:good", "found 'quality:good'"),
        ("quality:nan", "found 'quality:nan'"),
        ("quality:4,", "found ''"),
        ("quality:4,quality:3", "'quality' is rated twice"),
    ],
)
def test_malformed_labels(label, message):
    with pytest.raises(DataError, match=rf"f:1: .*{message}"):
        parse_label(label, "f:1")


def test_unknown_attributes():
    with pytest.raises(DataError, match=r"f:1: no attribute 'humour' \(did you mean 'humor'\?\)"):
        rating_vector({"humour": 1}, "f:1")
