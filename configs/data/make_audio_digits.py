"""Makes the rows of ``grpo_audio_digits``: ``python -m configs.data.make_audio_digits``; needs espeak-ng (apt install).

The words "zero" to "nine" are spoken by many voices (accents, timbres, speeds and pitches) and written as FLAC files at
espeak-ng's own rate into ``configs/data/audio_digits``, which is not part of the repository. Timbres of held-out rows
are not in the training rows. ``audio_digits_tiny.jsonl.gz`` holds 20 clips at 8 kHz in its records, and is. The same
files come out each time from the same version of espeak-ng.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

FOLDER = Path(__file__).parent
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029")
TIMBRES = {"train": ("m1", "m2", "m3", "m5", "m7", "f1", "f3", "f5"), "eval": ("m4", "m6", "f2", "f4")}
VOICES = {"train": 60, "eval": 12}
TINY_RATE = 8_000

Voice: TypeAlias = tuple[str, int, int]  # espeak-ng's name, words a minute, pitch


def voices(split: str) -> list[Voice]:
    """The voices of a split, all different in accent, timbre, speed or pitch."""
    dice = random.Random(split)
    return [
        (
            f"{dice.choice(ACCENTS)}+{dice.choice(TIMBRES[split])}",
            dice.randrange(120, 211, 5),
            dice.randrange(20, 81, 5),
        )
        for _ in range(VOICES[split])
    ]


def say(word: str, voice: Voice) -> tuple[np.ndarray, int]:
    """A spoken word without the silence around it, and its sampling rate."""
    name, speed, pitch = voice
    command = ["espeak-ng", "-v", name, "-s", str(speed), "-p", str(pitch), "--stdout", word]
    spoken = subprocess.run(command, check=True, capture_output=True).stdout
    # It writes as it speaks, so its header cannot tell the length: the samples follow 44 bytes.
    rate = int.from_bytes(spoken[24:28], "little")
    samples = np.frombuffer(spoken[44 : 44 + (len(spoken) - 44) // 2 * 2], "<i2").astype(np.float32) / 32768
    heard = np.flatnonzero(np.abs(samples) > 0.01)
    edge = rate * 3 // 100
    return samples[max(heard[0] - edge, 0) : heard[-1] + edge], rate


def flac(samples: np.ndarray, rate: int, subtype: str) -> bytes:
    """A FLAC file."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="FLAC", subtype=subtype)
    return buffer.getvalue()


def record(audio: str, digit: int) -> dict[str, Any]:
    """A prompt and its answer."""
    part = {"type": "audio", "audio": audio}
    return {"prompt": [{"role": "user", "content": [part]}], "completion": str(digit)}


def lines(records: Sequence[dict[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in records)


def main() -> None:
    """Writes the files beside this one."""
    from yatt_jax.data.media.audio import resample

    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng is not installed: apt install espeak-ng")
    folder = FOLDER / "audio_digits"
    folder.mkdir(exist_ok=True)
    for split in ("train", "eval"):
        rows = []
        for i, voice in enumerate(voices(split)):
            for digit, word in enumerate(WORDS):
                name = f"{split}_{i:02d}_{word}.flac"
                (folder / name).write_bytes(flac(*say(word, voice), "PCM_16"))
                rows.append(record(name, digit))
        random.Random(split).shuffle(rows)
        (folder / f"{split}.jsonl").write_text(lines(rows), "utf-8")
    rows = []
    for voice in voices("train")[:2]:
        for digit, word in enumerate(WORDS):
            clip, rate = say(word, voice)
            content = flac(resample(clip, rate, TINY_RATE), TINY_RATE, "PCM_S8")
            rows.append(record(base64.b64encode(content).decode(), digit))
    packed = gzip.compress(lines(rows).encode(), mtime=0)
    (FOLDER / "audio_digits_tiny.jsonl.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
