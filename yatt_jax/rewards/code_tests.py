"""The tests of code data sets, in any of the forms in use, and the programs that run them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any, TypeAlias

from yatt_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Statements:
    """Python statements that raise if the code is wrong, to be run after it, each by itself."""

    cases: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls of a function (or of a method of ``class Solution``), with what each must return."""

    function: str
    cases: tuple[tuple[list[Any], Any], ...]


@dataclasses.dataclass(frozen=True)
class Streams:
    """Standard inputs, with the standard output that each must give."""

    cases: tuple[tuple[str, str], ...]


Tests: TypeAlias = Statements | Calls | Streams


def parse_tests(value: Any, where: str, entry_point: str = "") -> Tests:
    """Reads the tests of a problem.

    * Text is Python that raises if the code is wrong; where it defines ``check``, that is called with the entry point
      (HumanEval). A list of texts is as many tests (MBPP).
    * ``{"inputs": [...], "outputs": [...]}`` (APPS, TACO; also ``input`` and ``output``) are standard inputs and
      outputs, or with ``fn_name`` lists of arguments and results.
    * ``[{"input", "output"}, ...]`` (LiveCodeBench) are standard inputs and outputs; if their ``testtype`` is
      "functional", arguments and result in JSON, an argument a line.
    * Text that is JSON of any of these.

    Args:
      value: the column.
      where: "file:line" and field, for messages.
      entry_point: name of the function that is asked for; empty: unknown.

    Raises:
      InputError: none of these.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # a statement may begin like that, too
            value = json.loads(value)
    if isinstance(value, str) and value.strip():
        call = f"\ncheck({entry_point})\n" if entry_point and "def check(" in value else ""
        return Statements((value + call,))
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        return Statements(tuple(value))
    function = entry_point
    if isinstance(value, dict):
        function = str(value.get("fn_name") or "")
        inputs, outputs = (value.get(name, value.get(name[:-1])) for name in ("inputs", "outputs"))
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            if function:
                return Calls(function, tuple(zip(map(list, inputs), outputs, strict=True)))
            return Streams(tuple((_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True)))
    if isinstance(value, list | tuple) and value and all(_is_case(one) for one in value):
        if all(one.get("testtype") == "functional" for one in value) and function:
            try:
                cases = tuple((_arguments(one["input"]), json.loads(one["output"])) for one in value)
            except ValueError as error:
                raise InputError(f"{where}: arguments or result are not JSON: {error}") from error
            return Calls(function, cases)
        if not any(one.get("testtype") == "functional" for one in value):
            return Streams(tuple((_text(one["input"]), _text(one["output"])) for one in value))
        raise InputError(f"{where}: functional tests need the name of the function; give its column as entry_point")
    raise InputError(
        f'{where}: expected Python text, a list of texts, {{"inputs": [...], "outputs": [...]}} or a list of '
        f'{{"input", "output"}}, found {str(value)[:100]!r}'
    )


def _is_case(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("input"), str) and isinstance(value.get("output"), str)


def _arguments(lines: str) -> list[Any]:
    return [json.loads(line) for line in lines.splitlines() if line.strip()]


def _text(value: Any) -> str:
    """Streams are texts, or lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


_CHECKER = """
import json, os, sys

def main():
    task = json.loads(sys.stdin.read())
    report = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    sys.stdin = open(os.devnull)
    token, names = task.pop("token"), {"__name__": "solution"}

    def same(found, wanted):
        if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
            return len(found) == len(wanted) and all(map(same, found, wanted))
        if isinstance(found, float) or isinstance(wanted, float):
            try:
                return abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))
            except TypeError:
                return False
        return found == wanted

    def passes(test):
        if isinstance(test, str):
            exec(compile(test, "<test>", "exec"), names)
            return True
        owner = names.get("Solution")
        function = names.get(task["function"])
        if function is None:
            function = getattr(owner(), task["function"])
        found = function(*test[0])
        # In some data sets the result lies in a list of its own.
        return same(found, test[1]) or (isinstance(test[1], list) and len(test[1]) == 1 and same(found, test[1][0]))

    def say(word):
        report.write(f"{token} {word}\\n")
        report.flush()

    exec(compile(task["code"], "<solution>", "exec"), names)
    for test in task["tests"]:
        try:
            good = passes(test)
        except Exception as error:
            good = False
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
        say("right" if good else "wrong")

main()
"""


def checker(code: str, tests: Statements | Calls, token: str) -> tuple[str, str]:
    """The program that runs tests on code, and its standard input.

    It writes a line for each test, the token and "right" or "wrong". Code that ends the program early leaves lines out,
    and code that writes to the standard output cannot write the token, which it does not know.
    """
    given: dict[str, Any] = {"code": code, "token": token}
    if isinstance(tests, Statements):
        given["tests"] = tests.cases
    else:
        given |= {"function": tests.function, "tests": tests.cases}
    return _CHECKER, json.dumps(given)


def same_text(found: str, wanted: str) -> bool:
    """Whether two outputs are the same but for white space at the ends of lines and rounding of numbers."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (found, wanted)]
    if lines[0] == lines[1]:
        return True
    words = [text.split() for text in (found, wanted)]
    return len(words[0]) == len(words[1]) and all(map(_same_word, *words))


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if not any(mark in wanted for mark in ".eE"):
        return False
    try:
        return math.isclose(float(found), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False
