"""Attributes that texts are rated by, and the labels that say so."""

from __future__ import annotations

from collections.abc import Mapping

from yatt_jax.data.config import DataError
from yatt_jax.errors import nearest

ATTRIBUTES = (
    "quality",
    "toxicity",
    "humor",
    "creativity",
    "helpfulness",
    "correctness",
    "coherence",
    "complexity",
    "verbosity",
)
"""In the order of a regression label."""

MISSING = -100.0
"""Stands for a rating that was not given; it is masked in the loss."""


def parse_label(label: str, where: str = "label") -> dict[str, float]:
    """The ratings in a label such as ``"quality:4,humor:0"``.

    Args:
      label: attributes and numbers, separated by commas.
      where: what to begin messages with.

    Raises:
      DataError: not of this form, an attribute twice, or an empty label.
    """
    ratings: dict[str, float] = {}
    for part in label.split(","):
        name, colon, number = (piece.strip() for piece in part.partition(":"))
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not name or not colon or value != value:
            raise DataError(f'{where}: expected "attribute:number" parts such as "quality:4,humor:0", found {part!r}')
        if name in ratings:
            raise DataError(f"{where}: {name!r} is rated twice")
        ratings[name] = value
    return ratings


def format_label(ratings: Mapping[str, float]) -> str:
    """Ratings as a label: known attributes in their fixed order, then others as they come; whole numbers without a dot.

    The inverse of ``parse_label``. To steer a model, write the attributes in the order that its training data has.
    """
    known = [name for name in ATTRIBUTES if name in ratings]
    order = [*known, *(name for name in ratings if name not in known)]
    return ",".join(f"{name}:{ratings[name]:g}" for name in order)


def rating_vector(ratings: Mapping[str, float], where: str = "label") -> tuple[float, ...]:
    """Ratings as a regression label: one number for each of ``ATTRIBUTES``, ``MISSING`` where there is none.

    Raises:
      DataError: an attribute that is not one of them.
    """
    for name in ratings:
        if name not in ATTRIBUTES:
            raise DataError(
                f"{where}: no attribute {name!r}{nearest(name, ATTRIBUTES)}; known: {', '.join(ATTRIBUTES)}"
            )
    return tuple(ratings.get(name, MISSING) for name in ATTRIBUTES)


def condition(label: str) -> str:
    """What the assistant's turn begins with when its text is to have these attributes.

    It is written into the turn's text, before the answer, and is not trained; to steer a model, let its response
    continue an assistant's turn that holds it.
    """
    return f"{label}\n"
