"""From the paths in a configuration to files that exist."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from yatt_jax.data.config import DataError

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow")


def expand(path: str) -> list[Path]:
    """The files or saved data sets that a path or pattern names, in name order. Reads nothing.

    Args:
      path: a file, a pattern with ``*``, ``?``, ``[...]`` or ``**``, or the folder of a saved ``datasets`` data set.

    Raises:
      DataError: nothing there (the message gives the nearest existing name), or a kind of file that is not read.
    """
    found = Path(path).expanduser()
    if found.exists():
        paths = [found]
    elif glob.has_magic(path):
        paths = [Path(p) for p in sorted(glob.glob(str(found), recursive=True))]
        if not paths:
            raise DataError(f"{path}: no file matches this pattern{_nearest(_fixed_part(found))}")
    else:
        raise DataError(f"{path}: no such file or folder{_nearest(found)}")
    for p in paths:
        if p.is_dir():
            _check_folder(p)
        elif not p.name.lower().endswith(EXTENSIONS):
            raise DataError(f"{p}: cannot tell the format from the name; names end in {', '.join(EXTENSIONS)}")
    return paths


def _check_folder(folder: Path) -> None:
    """Raises unless the folder is a saved data set."""
    if (folder / "state.json").is_file():
        return
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if (p / "state.json").is_file())
        raise DataError(
            f"{folder}: holds several splits; name one of {[str(folder / s) for s in splits]}"
            if splits
            else f"{folder}: dataset_dict.json is there, but no split's folder"
        )
    endings = sorted({e for p in folder.iterdir() for e in EXTENSIONS if p.name.lower().endswith(e)})
    hint = f"; for the files in it write {str(folder / ('*' + endings[0]))!r}" if endings else ""
    raise DataError(f"{folder}: a folder, but no saved data set (no state.json){hint}")


def _fixed_part(pattern: Path) -> Path:
    """The leading part of a pattern that has no wildcard."""
    parts: list[str] = []
    for part in pattern.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path(".")


def _nearest(path: Path) -> str:
    """What exists near a missing path, for a message."""
    if path.exists():
        return _listing(path) if path.is_dir() else ""
    folder = path.parent
    if not folder.is_dir():
        while not folder.is_dir():
            folder = folder.parent
        return f"; the folder {str(path.parent)!r} does not exist, {str(folder)!r} does"
    names = [p.name for p in folder.iterdir()]
    close: Sequence[str] = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f" (did you mean {str(folder / close[0])!r}?)" if close else _listing(folder)


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.name.lower().endswith(EXTENSIONS))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"; data files in {str(folder)!r}: {shown}" if names else f"; {str(folder)!r} holds no data file"
