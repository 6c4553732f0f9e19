"""The process that compares mathematical answers: run as a script, it reads and writes one JSON object a line.

It imports nothing of this package, so that it starts fast and holds little memory. A task is
``{"golds": [str], "text": str, "limit_s": float}``; the answer is ``{"score": 0.0 | 1.0}`` or ``{"invalid": reason}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import sys
from typing import Any

_MEMORY_BYTES = 4 << 30


def main() -> None:
    """Serves tasks until the standard input ends."""
    # Answers go to a copy of the standard output; whatever a library prints goes to the standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    from math_verify import parse, verify

    # The time limits of math-verify need signals in the main thread; here the parent kills the process instead.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    sys.setrecursionlimit(3000)

    def extract(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]

    def judge(task: dict[str, Any]) -> dict[str, Any]:
        golds = [gold for gold in (extract(in_math(text)) for text in task["golds"]) if gold]
        if not golds:
            return {"invalid": f"the gold answer {task['golds']} is no mathematical expression"}
        found = extract(task["text"]) or extract(last_line_in_math(task["text"]))
        equal = bool(found) and any(verify(gold, found, timeout_seconds=None) for gold in golds)
        return {"score": 1.0 if equal else 0.0}

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        # Should the parent die while a task hangs, the kernel ends this process.
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _limit(resource.RLIMIT_CPU, math.ceil(used + 2 * task["limit_s"] + 5))
        try:
            answer = judge(task)
        except Exception as error:
            answer = {"invalid": f"math-verify failed: {type(error).__name__}"}
        print(json.dumps(answer), file=answers, flush=True)


def in_math(text: str) -> str:
    """A gold answer inside math delimiters, so that it is read as a whole and not searched for its last number."""
    if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")):
        return text
    return "$" + text.replace("\\%", "%").replace("%", "\\%") + "$"


def last_line_in_math(text: str) -> str:
    r"""The last line as a formula, for bare LaTeX such as ``\sqrt{8}``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return in_math(lines[-1]) if lines and len(lines[-1]) < 200 and "\\" in lines[-1] else ""


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with contextlib.suppress(ValueError, OSError):  # not every system has every limit
        resource.setrlimit(kind, (value, hard))


if __name__ == "__main__":
    main()
