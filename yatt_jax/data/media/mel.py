"""Log-mel spectra as Whisper's feature extractor makes them, in NumPy and only as long as the audio is.

S[t, f] = |rfft(hann * x[160 t - 200 : 160 t + 200])|^2        x reflected at its start, zeros after its end
L = log10(max(S @ filters, 1e-10));   values = (max(L, max(L) - 8) + 4) / 4
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from yatt_jax.errors import InputError

EDGE = 2  # frames of the silence that follows, which the convolutions of an encoder see from the last frame


@dataclasses.dataclass(frozen=True)
class Mel:
    """How audio becomes frames: the settings of ``WhisperFeatureExtractor``.

    Attributes:
      bins: mel bins of a frame.
      rate: samples a second.
      window: samples of a frame.
      hop: samples from frame to frame.
      seconds: the longest audio.
    """

    bins: int = 128
    rate: int = 16_000
    window: int = 400
    hop: int = 160
    seconds: int = 30

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Mel:
        """From a preprocessor_config.json; what it lacks is as ``WhisperFeatureExtractor`` has it, with 80 bins.

        Raises:
          InputError: settings that change the frames in a way that is not read.
        """
        for key in ("dither", "padding_value"):
            if settings.get(key):
                raise InputError(f"the feature extractor's {key} = {settings[key]!r} is not read; expected none")
        names = {
            "bins": ("feature_size", 80),
            "rate": ("sampling_rate", 16_000),
            "window": ("n_fft", 400),
            "hop": ("hop_length", 160),
            "seconds": ("chunk_length", 30),
        }
        return cls(**{ours: int(settings.get(theirs, default)) for ours, (theirs, default) in names.items()})

    @functools.cached_property
    def filters(self) -> np.ndarray:
        """The mel filters, ``[window // 2 + 1, bins]``."""
        from transformers.audio_utils import mel_filter_bank

        return mel_filter_bank(
            num_frequency_bins=1 + self.window // 2,
            num_mel_filters=self.bins,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=self.rate,
            norm="slaney",
            mel_scale="slaney",
        )


def audio_tokens(frames: int) -> int:
    """Features of so many frames: a convolution of stride 2, and pairs averaged; 0 below three frames."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1 if frames > 2 else 0


def log_mel(
    samples: Float[np.ndarray, "S"],
    filters: Float[np.ndarray, "F M"],
    *,
    window: int,
    hop: int,
    longest: int,
) -> Float[np.ndarray, "A M"]:
    """Spectra of audio that is padded with silence.

    They equal the first frames of what ``WhisperFeatureExtractor`` makes of the same audio padded to ``longest``.

    Args:
      samples: one channel; at most ``longest``.
      filters: mel filters of ``window // 2 + 1`` frequencies.
      window: samples of a frame.
      hop: samples from frame to frame.
      longest: samples that the extractor pads to.

    Returns:
      ``ceil(S / hop)`` frames, and up to ``EDGE`` more, as far as ``longest`` goes.
    """
    count = min(-(-len(samples) // hop) + EDGE, longest // hop)
    half = window // 2
    padded = np.zeros(longest if count * hop + half > longest else count * hop + half, np.float64)
    padded[: len(samples)] = samples
    # At the very end of the longest audio the extractor reflects it; elsewhere silence follows.
    padded = np.pad(padded, (half, half if len(padded) == longest else 0), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop][:count]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    # No BLAS: its threads and those that decode would wait for each other.
    values = np.log10(np.maximum(np.einsum("tf,fm->tm", power, filters), 1e-10))
    return ((np.maximum(values, values.max() - 8) + 4) / 4).astype(np.float32)
