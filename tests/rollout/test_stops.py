"""Stop strings: which token completes one, and the text before it."""

from __future__ import annotations

import pytest

from yatt_jax.rollout.stops import Stop, check_stops, find_stop

PIECES = {0: "ab", 1: "c", 2: "abc", 3: "\n", 4: "d\n\nd", 5: ""}


class Words:
    """A tokenizer with pieces of several characters."""

    all_special_tokens = ("<end>",)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(PIECES[i] for i in token_ids)


def find(tokens: list[int], *stop: str, **options: int) -> Stop | None:
    return find_stop(Words(), tokens, stop, **options)


def test_the_completing_token_and_the_text_before() -> None:
    assert find([1, 1, 0, 1], "bc") == Stop(4, "cca")  # across two tokens
    assert find([1, 2, 0], "b") == Stop(2, "ca")  # inside a token: it is kept, the text is cut before the string
    assert find([1, 4, 1], "\n\n", "d") == Stop(2, "c")  # both at once: the text is cut at the first
    assert find([3, 1, 3, 3], "\n\n") == Stop(4, "\nc")
    assert find([1, 1], "d") is None
    assert find([], "d") is None
    assert find([5, 5], "d") is None


def test_result_does_not_depend_on_when_one_looks() -> None:
    tokens = [1, 3, 0, 1, 2, 3]
    whole = find(tokens, "bc", "c\n")
    assert whole == Stop(2, "")
    for first in range(1, len(tokens)):
        early = find(tokens[:first], "bc", "c\n")
        late = find(tokens, "bc", "c\n", checked=first) if early is None else early
        assert late == whole


def test_text_before_the_least_length_does_not_count() -> None:
    tokens = [0, 0, 0, 1]
    assert find(tokens, "ab", min_new_tokens=0) == Stop(1, "")
    assert find(tokens, "ab", min_new_tokens=1) == Stop(1, "")
    assert find(tokens, "ab", min_new_tokens=2) == Stop(2, "ab")
    assert find(tokens, "ba", min_new_tokens=2) == Stop(2, "a")  # completed by the second token
    assert find(tokens, "ab", min_new_tokens=4) is None
    assert find(tokens, "bc", min_new_tokens=4) == Stop(4, "ababa")
    assert find(tokens[:3], "ab", min_new_tokens=4) is None


def test_a_special_token_is_no_stop_string() -> None:
    check_stops(Words(), ("a",))
    with pytest.raises(ValueError, match=r"'<end>' is a special token.*stop_token_ids"):
        check_stops(Words(), ("a", "<end>"))
