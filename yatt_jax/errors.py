"""Errors that are messages to the user, and not faults of the program."""


class InputError(ValueError):
    """Something given to the program is wrong: a key, a file, a record.

    The message names it and says how to mend it; commands print it without a traceback and exit with status 2.
    """


class RunFailure(RuntimeError):
    """A run that cannot go on; what it has written stays. Commands print it without a traceback and exit with 1."""
