"""Makes the report of one or more run directories, at any time, from their files alone.

python -m tools.report RUN_DIR                         writes RUN_DIR/report.html
python -m tools.report RUN_DIR RUN_DIR ...             one page with the curves overlaid, beside the run directories
python -m tools.report RUN_DIR ... --svg docs/run.svg  also the reward curve as a picture
python -m tools.report RUN_DIR --timeline docs/t.svg   also the timeline of the last steps as a picture
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from yatt_jax.report.html import page
from yatt_jax.report.picture import picture, timeline_picture
from yatt_jax.report.read import read_run
from yatt_jax.report.rundir import RunDirError, replace_text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the --workdir of a run")
    parser.add_argument("--out", type=Path, help="where the page goes")
    parser.add_argument("--svg", type=Path, help="also draw the reward curve into this file")
    parser.add_argument("--timeline", type=Path, help="also draw the timeline of the last steps into this file")
    parser.add_argument("--title", default="Reward by step", help="heading of the reward curve")
    options = parser.parse_args(argv)
    if options.timeline and len(options.runs) > 1:
        parser.error(f"--timeline draws one run, and {len(options.runs)} are named")
    try:
        runs = [read_run(path) for path in options.runs]
        out = options.out or _beside(options.runs) / "report.html"
        replace_text(out, page(runs))
        print(out)
        if options.svg:
            replace_text(options.svg, picture(runs, options.title))
            print(options.svg)
        if options.timeline:
            replace_text(options.timeline, timeline_picture(runs[0]))
            print(options.timeline)
    except RunDirError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _beside(runs: Sequence[Path]) -> Path:
    return runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.resolve().parent for run in runs]))


if __name__ == "__main__":
    sys.exit(main())
