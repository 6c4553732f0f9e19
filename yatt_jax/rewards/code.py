"""Rewards by running the code of a completion against tests."""

from __future__ import annotations

import dataclasses
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from yatt_jax.errors import InputError
from yatt_jax.rewards.code_tests import Calls, Statements, Streams, Tests, checker, parse_tests, same_text
from yatt_jax.rewards.counts import Counts
from yatt_jax.rewards.sandbox import Limits, Outcome, Sandbox, SandboxError
from yatt_jax.rewards.sandbox.run import Isolation
from yatt_jax.rewards.spec import Failed

if TYPE_CHECKING:
    from yatt_jax.types import Sample

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPEN_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Code:
    """A reward by tests, run in a sandbox: ``fn = "yatt_jax.rewards.code:Code"``.

    Code is taken from the last fenced block of Python in the completion, else the last block, else it is the whole.

    Attributes:
      tests: column of the tests; see ``code_tests.parse_tests`` for their forms.
      entry_point: column with the name of the function that is asked for; empty: none.
      before: column with text that goes before the code, such as imports or the beginning of a function; empty: none.
      score: "all" gives 1 where every test passes, else 0; "share" the share of them that pass.
      most_tests: the first so many tests of a problem are run; 0: all.
      parallel: programs at the same time.
      limits: of each program.
      isolation: "full" refuses to start where the kernel lets no files or network be kept away; "best" goes on.
      python: interpreter of the programs; empty: this one.
    """

    tests: str = "tests"
    entry_point: str = ""
    before: str = ""
    score: Literal["all", "share"] = "all"
    most_tests: int = 0
    parallel: int = 2
    limits: Limits = Limits()
    isolation: Isolation = "full"
    python: str = ""

    def __post_init__(self) -> None:
        if self.parallel < 1 or self.most_tests < 0:
            raise ValueError(
                f"parallel = {self.parallel} and most_tests = {self.most_tests}: must be at least 1, and not negative"
            )

    def open(self) -> CodeScorer:
        """The reward function.

        Raises:
          InputError: a sandbox that cannot be had, or that does not work.
        """
        return CodeScorer(self)


class CodeScorer:
    """Runs the code of samples; made by ``Code.open``."""

    def __init__(self, settings: Code) -> None:
        self._settings = settings
        try:
            self._sandbox = Sandbox(settings.limits, isolation=settings.isolation, python=settings.python)
        except SandboxError as error:
            raise InputError(str(error)) from error
        self._threads = ThreadPoolExecutor(settings.parallel, "code")
        self.counts = Counts()
        for name in ("programs", *(f"ended_{limit}" for limit in ("time", "memory", "processes", "output", "disk"))):
            self.counts.add(name, 0)

    def __call__(self, samples: list[Sample]) -> list[float | Failed]:
        """The score of each sample.

        Raises:
          InputError: a record lacks a column, or its tests cannot be read.
        """
        tasks = [self._task(sample) for sample in samples]
        return list(self._threads.map(lambda task: self._score(*task), tasks))

    def close(self) -> None:
        """Ends the threads when their programs have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _task(self, sample: Sample) -> tuple[str, Tests]:
        """Code and tests of a sample."""
        settings, prompt = self._settings, sample.prompt

        def column(name: str) -> object:
            if name and name not in prompt.columns:
                raise InputError(
                    f"{prompt.source}: the reward needs the field {name!r}, and the record's further fields are "
                    f"{sorted(prompt.columns)}"
                )
            return prompt.columns[name] if name else ""

        where = f'{prompt.source}: field "{settings.tests}"'
        tests = parse_tests(column(settings.tests), where, str(column(settings.entry_point)))
        if most := settings.most_tests:
            tests = dataclasses.replace(tests, cases=tests.cases[:most])
        before = str(column(settings.before))
        return before + ("\n" if before and not before.endswith("\n") else "") + find_code(sample.completion), tests

    def _score(self, code: str, tests: Tests) -> float | Failed:
        try:
            right, count = self._streams(code, tests) if isinstance(tests, Streams) else self._checked(code, tests)
        except SandboxError as error:
            return Failed(str(error))
        return right / count if self._settings.score == "share" else float(right == count)

    def _streams(self, code: str, tests: Streams) -> tuple[int, int]:
        """How many tests pass, and how many there are; with "all" it ends with the first that does not."""
        right = 0
        for given, wanted in tests.cases:
            outcome = self._run(code, given)
            if outcome.status == 0 and same_text(outcome.stdout, wanted):
                right += 1
            elif self._settings.score == "all":
                break
        return right, len(tests.cases)

    def _checked(self, code: str, tests: Statements | Calls) -> tuple[int, int]:
        token = secrets.token_hex(16)
        program, given = checker(code, tests, token)
        outcome = self._run(program, given)
        count = len(tests.cases)
        said = [line for line in outcome.stdout.splitlines() if line.startswith(token + " ")]
        return sum(line == f"{token} right" for line in said[:count]), count

    def _run(self, program: str, given: str) -> Outcome:
        outcome = self._sandbox.run(program, given)
        self.counts.add("programs")
        if outcome.reason:
            self.counts.add(f"ended_{outcome.reason.replace(' ', '_')}")
        return outcome


def find_code(completion: str) -> str:
    """The code in a completion; see ``Code``."""
    blocks = _FENCE.findall(completion)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    if blocks:
        return (python or [code for _, code in blocks])[-1]
    opened = _OPEN_FENCE.search(completion)  # a block that was cut
    return completion[opened.end() :] if opened else completion
