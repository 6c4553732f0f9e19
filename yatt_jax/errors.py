"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Something given to the program is wrong: a key, a file, a record.

    The message names it and says how to mend it; commands print it without a traceback and exit with status 2.
    """
