"""Errors that are messages to the user, and not faults of the program."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class InputError(ValueError):
    """Something given to the program is wrong: a key, a file, a record.

    The message names it and says how to mend it; commands print it without a traceback and exit with ``status``.
    """

    status = 2


class RunFailure(RuntimeError):
    """A run that cannot go on; what it has written stays.

    Commands print it without a traceback and exit with ``status``.
    """

    status = 1


class UserCodeFailure(RunFailure):
    """A function of the user's raised; commands print the traceback of its error (``__cause__``)."""


def told(error: BaseException) -> str:
    """What a command prints of an error that is a message to the user."""
    if not isinstance(error, UserCodeFailure) or error.__cause__ is None:
        return str(error)
    return f"{error}\n{''.join(traceback.format_exception(error.__cause__)).rstrip()}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known name, or nothing where none is near; to end a message with."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
