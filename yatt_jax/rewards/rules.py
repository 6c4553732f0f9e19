"""Rewards by rule. All are safe in threads; gold answers come from a column of the prompt's record.

Completions reach them decoded, without special tokens and cut before a stop string.
"""

from __future__ import annotations

import functools
import math
import random
import re
from typing import TYPE_CHECKING, Any, Literal

from yatt_jax.errors import InputError
from yatt_jax.rewards.spec import Invalid
from yatt_jax.rewards.verify import shared_verifier

if TYPE_CHECKING:
    from yatt_jax.types import Sample


def exact_match(
    samples: list[Sample], *, answer: str = "answer", strip: bool = True, ignore_case: bool = False
) -> list[float]:
    """1 where the completion is the gold answer (or one of them, if the column holds a list), else 0.

    Args:
      samples: to score.
      answer: column of the gold answer.
      strip: ignore white space around both.
      ignore_case: ignore upper and lower case.

    Raises:
      InputError: a record without the column.
    """

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return [
        float(normal(sample.completion) in {normal(gold) for gold in gold_answers(sample, answer)})
        for sample in samples
    ]


def regex_match(samples: list[Sample], *, pattern: str = "", column: str = "", full: bool = False) -> list[float]:
    r"""1 where a regular expression is found in the completion, else 0.

    Args:
      samples: to score.
      pattern: the expression (Python's ``re``; flags go inside, as ``(?is)``).
      column: in place of ``pattern``, the column that holds one for each prompt.
      full: the expression must match the whole completion, white space around it aside.

    Raises:
      InputError: neither or both of ``pattern`` and ``column``, a malformed expression, or a record without the column.
    """
    if bool(pattern) == bool(column):
        raise InputError("regex_match: give one of pattern and column")
    values = []
    for sample in samples:
        text = pattern or str(_column(sample, column))
        try:
            compiled = re.compile(text)
        except re.error as error:
            raise InputError(f"{sample.prompt.source}: malformed regular expression {text!r}: {error}") from error
        found = compiled.fullmatch(sample.completion.strip()) if full else compiled.search(sample.completion)
        values.append(float(found is not None))
    return values


def numeric_equal(
    samples: list[Sample], *, answer: str = "answer", tolerance: float = 1e-6, pattern: str = ""
) -> list[float]:
    r"""1 where the last number of the completion equals the gold number, else 0.

    Numbers may have thousands separators, a fraction ("3/4"), an exponent or a percent sign, which is ignored.

    Args:
      samples: to score.
      answer: column of the gold answer: a number, or text whose last number counts.
      tolerance: allowed difference, relative to the gold number (absolute where that is below 1).
      pattern: read the number from the first group of this expression's last match, as ``####\s*(.*)``.

    Raises:
      InputError: a record without the column, or without a number in it.
    """
    values = []
    for sample in samples:
        gold = [last_number(text) for text in gold_answers(sample, answer)]
        if None in gold:
            found = _column(sample, answer)
            raise InputError(f'{sample.prompt.source}: field "{answer}": expected a number, found {found!r}')
        text = sample.completion
        if pattern:
            matches = list(re.finditer(pattern, text))
            text = matches[-1].group(1 if matches[-1].re.groups else 0) if matches else ""
        number = last_number(text)
        close = number is not None and any(
            abs(number - g) <= tolerance * max(1.0, abs(g)) for g in gold if g is not None
        )
        values.append(float(close))
    return values


def math_equal(
    samples: list[Sample], *, answer: str = "answer", timeout_s: float = 5.0, processes: int = 2
) -> list[float | Invalid]:
    r"""1 where the final answer of the completion equals the gold answer mathematically, else 0.

    The completion's answer is found and compared by math-verify: ``\boxed{...}``, other LaTeX, or the last number. The
    work is done in processes that are killed at the time limit, so the function can be called from any thread; a sample
    that runs into the limit is invalid, and counted with its reason.

    Args:
      samples: to score.
      answer: column of the gold answer, in LaTeX or plain notation; a list means that any of them is right.
      timeout_s: seconds one comparison may take.
      processes: comparisons at the same time.

    Raises:
      InputError: a record without the column.
    """
    if processes < 1 or timeout_s <= 0:
        raise InputError(f"math_equal: processes = {processes} and timeout_s = {timeout_s} must be above 0")
    tasks = [(gold_answers(sample, answer), sample.completion) for sample in samples]
    return shared_verifier(processes).judge(tasks, timeout_s)


def length(
    samples: list[Sample],
    *,
    target: int,
    width: float = 0.0,
    unit: Literal["tokens", "words", "characters"] = "tokens",
) -> list[float]:
    """Closeness of the response's length to a target: ``max(0, 1 - |length - target| / width)``.

    Args:
      samples: to score.
      target: the wanted length, where the reward is 1.
      width: difference at which the reward reaches 0; 0: as large as ``target``, or 1 if that is 0.
      unit: what is counted; tokens include the stop token.

    Raises:
      InputError: a negative target or width, or an unknown unit.
    """
    counters = {
        "tokens": lambda sample: len(sample.tokens),
        "words": lambda sample: len(sample.completion.split()),
        "characters": lambda sample: len(sample.completion),
    }
    if unit not in counters:
        raise InputError(f"length: unit = {unit!r}: expected one of {list(counters)}")
    if target < 0 or width < 0:
        raise InputError(f"length: target = {target} and width = {width} must not be negative")
    scale = width or max(target, 1)
    return [max(0.0, 1.0 - abs(counters[unit](sample) - target) / scale) for sample in samples]


def sentiment(samples: list[Sample]) -> list[float]:
    """Sentiment of the completion from -1 (negative) to 1 (positive): VADER's compound score (Hutto and Gilbert 2014).

    Raises:
      InputError: the demo extra is not installed.
    """
    analyzer = _analyzer()
    return [float(analyzer.polarity_scores(sample.completion)["compound"]) for sample in samples]


def digits(samples: list[Sample]) -> list[float]:
    """The task of ``configs/ppo_digits.py``: count up to nine from the prompt's last digit, and stop.

    To the prompt "274" the right response is "56789" and its end; to "039" it is the end alone. The reward is dense,
    from 0 to 1: the share of the right response's decisions (its digits and its end) that come before the first slip::

        (length of the common prefix of response and right response) / (digits up to nine + 1)

    A slip ends the count, so in every state of a response just one choice is worth more than the others, and no wrong
    habit pays. The task uses the characters 0 to 9 (tokenizer ``characters:0123456789``) and can be learned from the
    reward alone, beginning with random weights: guessing gets about 0.03, and one response for all prompts at most 0.1.
    The longest response is ten tokens, the end included.

    Raises:
      InputError: a prompt that does not end in a digit.
    """
    values = []
    for sample in samples:
        users = [turn["content"] for turn in sample.prompt.messages if turn["role"] == "user"]
        asked = users[-1] if users else sample.prompt.text
        last = asked[-1:]
        if last not in _DIGITS or not last:
            raise InputError(f"{sample.prompt.source}: expected a prompt of digits, found {asked!r}")
        right = _DIGITS[int(last) + 1 :] + _END
        written = sample.completion + (_END if sample.finish == "stop" else "")
        same = next((i for i, (a, b) in enumerate(zip(right, written, strict=False)) if a != b), len(written))
        values.append(min(same, len(right)) / len(right))
    return values


def shuffled(samples: list[Sample], *, seed: int = 0) -> list[float]:
    """The control of the digits task: its rewards, dealt out to the samples at random, so that they teach nothing.

    Args:
      samples: to score.
      seed: of the order, together with the number of the first sample.
    """
    values = digits(samples)
    random.Random(f"{seed} {samples[0].sample_id if samples else 0}").shuffle(values)
    return values


_DIGITS = "0123456789"
_END = "\n"  # stands for the end in a comparison of characters; the task's alphabet has no line break


def gold_answers(sample: Sample, column: str) -> list[str]:
    """The answers in a column of the sample's record, as text; one, or several if it holds a list.

    Raises:
      InputError: the record has no such column, or an empty list in it.
    """
    value = _column(sample, column)
    answers = [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    if not answers:
        raise InputError(f'{sample.prompt.source}: field "{column}" is an empty list')
    return answers


def _column(sample: Sample, name: str) -> Any:
    if name not in sample.prompt.columns:
        raise InputError(
            f'{sample.prompt.source}: the reward needs the field "{name}", and the record\'s further fields are '
            f"{sorted(sample.prompt.columns)}; add it, or name another column in the reward's kwargs"
        )
    return sample.prompt.columns[name]


_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"  # a sign, and not a minus between two terms
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?"
    r"(?:\s?/\s?(?P<below>\d+(?:\.\d+)?))?"
)


def last_number(text: str) -> float | None:
    """The last number in a text; None where there is none, or where it divides by zero."""
    matches = list(_NUMBER.finditer(text.replace("\u2212", "-")))
    if not matches:
        return None
    match = matches[-1]
    below = match.group("below")
    above = match.group(0).split("/")[0] if below else match.group(0)
    number = float(above.replace(",", "").strip())
    if below:
        number = number / float(below) if float(below) else math.nan
    return number if math.isfinite(number) else None


@functools.cache
def _analyzer() -> Any:
    """VADER's analyzer; its lexicon is read once."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError as error:
        raise InputError("the sentiment reward needs vaderSentiment: pip install 'yatt_jax[demo]'") from error
    return SentimentIntensityAnalyzer()
