"""What commands print of errors that are messages to the user."""

from __future__ import annotations

import pytest

from yatt_jax.errors import InputError, RunFailure, told
from yatt_jax.rewards import RewardError, build
from yatt_jax.rewards.spec import RewardSpec
from yatt_jax.types import Prompt, Sample


def raises(samples: list[Sample]) -> list[float]:
    """A reward with a fault."""
    return [1.0 / (len(sample.tokens) - 1) for sample in samples]


def test_a_fault_in_a_reward_shows_where_it_is() -> None:
    scorer = build({"faulty": RewardSpec("tests.test_errors:raises")})
    with pytest.raises(RewardError) as caught:
        scorer([Sample(Prompt([], "p", [1], {}, "f:1", 0), "c", [1], "stop", 0, 0)])
    message = told(caught.value)
    assert message.startswith(str(caught.value))
    assert "Traceback (most recent call last):" in message
    assert "test_errors.py" in message
    assert "return [1.0 / (len(sample.tokens) - 1)" in message


@pytest.mark.parametrize("error", [InputError("a"), RunFailure("a")])
def test_other_messages_have_no_traceback(error: Exception) -> None:
    error.__cause__ = ValueError("b")
    assert told(error) == "a"
