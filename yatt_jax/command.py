"""What the commands share: flags with a config file, and mistakes in them told in a line."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from yatt_jax.errors import InputError, nearest


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs in a folder between runs; empty: nowhere."""
    if folder:
        import jax

        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def parse_flags(argv: list[str], known: Sequence[str]) -> list[str]:
    """Absl's parser, with mistakes turned into ``InputError``.

    Args:
      argv: the command line.
      known: names of the command's own flags.
    """
    try:
        return flags.FLAGS(argv)
    except SyntaxError as error:
        raise InputError(f"--config: {error.filename}, line {error.lineno}: {error.msg}") from error
    except flags.UnrecognizedFlagError as error:
        near = nearest(error.flagname.partition(".")[0], known)
        raise InputError(f"unknown flag --{error.flagname}{near}") from error
    except Exception as error:  # a config file is a program, and may raise anything
        raise InputError(reason(error)) from error


def reason(error: Exception) -> str:
    """What went wrong with the flags, without the tracebacks that the config loader puts into its messages."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    missing = re.search(r"No such file or directory: '([^']+\.py)'", text)
    if missing:
        near = nearest(missing[1], [str(p) for p in Path("configs").rglob("*.py")])
        return f"--config: no such file: {missing[1]}{near}"
    said = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if "Traceback (most recent call last):" in text:
        return f"--config: {said[-1]}"
    if not isinstance(error, flags.Error | KeyError | AttributeError | TypeError | ValueError | OSError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"--config: {where.filename}, line {where.lineno}: {type(error).__name__}: {said[0]}"
    if "no attribute 'get_config'" in text:
        return "--config: the file has no function get_config(variant=''), which returns the config"
    unknown = re.search(r"Did you mean \"([^\"]+)\" instead of \"([^\"]+)\"", text)
    if unknown:
        return f"{_flag_with(unknown[2])}: unknown key (did you mean {unknown[1]!r}?)"
    # A KeyError shows its message as a literal, with escapes.
    plain = re.sub(r"\\n|\\'|\s+", " ", text).strip()
    return f"--config: unknown key: {plain}" if isinstance(error, KeyError) else f"--config: {plain}"


def _flag_with(key: str) -> str:
    """The flag of the command line that ends in a key, as "config.parallel.train.datta"."""
    for word in sys.argv[1:]:
        name = word.lstrip("-").partition("=")[0]
        if name.rpartition(".")[2] == key:
            return name
    return f"config ... {key}"
