"""Makes the rows of ``ppo_vision_digits``: ``python -m configs.data.make_vision_digits``; needs scikit-learn.

They are the 1,797 handwritten digits that scikit-learn ships (Alpaydin and Kaynak 1998, the test part of "Optical
recognition of handwritten digits", 8 x 8 pixels of 17 levels), each a PNG image in its record. The last 297 are held
out. The same files come out each time.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
EVAL = 297  # rows, from the end


def png(levels: np.ndarray) -> bytes:
    """A grey image of levels from 0 to 16, dark on light."""
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(np.rint(255 - levels * 255 / 16).astype(np.uint8))
    image.quantize(32).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def record(levels: np.ndarray, digit: int) -> dict[str, Any]:
    """A prompt and its answer."""
    part = {"type": "image", "image": base64.b64encode(png(levels)).decode()}
    return {"prompt": [{"role": "user", "content": [part]}], "completion": str(digit)}


def main() -> None:
    """Writes the files beside this one."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    data: Any = load_digits()
    rows = [json.dumps(record(*row)) + "\n" for row in zip(data.images, data.target.tolist(), strict=True)]
    for split, lines in (("train", rows[:-EVAL]), ("eval", rows[-EVAL:])):
        packed = gzip.compress("".join(lines).encode(), mtime=0)
        (FOLDER / f"vision_digits_{split}.jsonl.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
