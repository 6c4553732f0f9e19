"""The dimension key and the few data types that flow through the trainer.

Dimension key, used in signatures and as suffixes of local names:

    B rows   T tokens   V vocabulary   D hidden size   N prompts   G samples a prompt   K kept logits
    S packs of media   P patches   C chunks of sound

A *row* is one sequence: a prompt, a prompt with its response, or several packed documents. Models accept any
leading axes, written ``*B``, so a preference pair is a row of shape ``[B, 2, T]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

Params: TypeAlias = Any  # nested dict of arrays
PyTree: TypeAlias = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ratio:
    """A mean that is not yet divided: ``total / weight``.

    Losses and metrics are returned as sums and weights, so that adding them over micro-batches, devices and
    processes and dividing once gives the same number for every split. A weight of 0 means "no data".
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.total + other.total, self.weight + other.weight)

    def mean(self) -> Float[Array, ""]:
        """``total / weight``, and 0 where the weight is 0."""
        empty = self.weight == 0
        return jax.numpy.where(empty, 0.0, self.total / jax.numpy.where(empty, 1.0, self.weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A maximum over whatever it is added up over; combines with ``+`` as ``Ratio`` does."""

    value: Float[Array, ""]

    def __add__(self, other: Max) -> Max:
        return Max(jax.numpy.maximum(self.value, other.value))


Metrics: TypeAlias = dict[str, Ratio | Max]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Patches:
    """Images and videos cut into patches, end to end in S packs: what a vision tower reads.

    The patches that make one feature lie side by side, and so do those of one window.

    Attributes:
      pixels: of each patch, flat.
      places: row and column of each patch in its image, in patches.
      segments: number of the image, or of the video's frame, within the pack, from 1; 0 is padding. Patches see their
        own segment.
      windows: the same for layers that see a window; None where the tower has none.
    """

    pixels: Float[Array, "S P F"]
    places: Int[Array, "S P 2"]
    segments: Int[Array, "S P"]
    windows: Int[Array, "S P"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frames:
    """Sound as log-mel frames, in C chunks a pack that are heard one by one: what an audio tower reads.

    Attributes:
      mels: bins of each frame.
      lengths: real frames of each chunk; 0 is padding. What lies past them is data too: see ``models.audio``.
    """

    mels: Float[Array, "S C N F"]
    lengths: Int[Array, "S C"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Media:
    """What multimodal rows carry beside tokens; ``models.media`` makes it.

    Media lie in S packs, and S divides the rows: rows b with the same ``b * S // B`` take their features from one
    pack. So several rows may show the same item, which then passes the tower once.

    Attributes:
      index: which feature of its pack stands in the place of each token, from 1: those of patches first, then those
        of frames; 0 leaves the token.
      patches: images and videos.
      frames: sound.
      features: in the place of patches and frames, what towers have made of them (``decoder.Decoder.features``).
      spans: number of the image that a token stands for, within the row, from 1, where tokens of an image see each
        other; 0 elsewhere.
      positions: time, height and width of each token, where rotary embeddings turn by three positions.
    """

    index: Int[Array, "*B T"]
    patches: Patches | None = None
    frames: Frames | None = None
    features: Float[Array, "S N D"] | None = None
    spans: Int[Array, "*B T"] | None = None
    positions: Int[Array, "*B T 3"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a model reads.

    Attributes:
      tokens: token ids; the value at padding does not matter.
      positions: running count of real tokens within a segment, from 0.
      segments: document number within the row, from 1; 0 marks padding. Tokens attend within their segment only.
      media: images and audio whose features take the place of embeddings.
    """

    tokens: Int[Array, "*B T"]
    positions: Int[Array, "*B T"]
    segments: Int[Array, "*B T"]
    media: Media | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sampled rows as arrays: prompt and response side by side, from index 0, padded on the right.

    Where an algorithm compares with the data's own answers, the prompt with that answer follows as segment 2.

    Attributes:
      inputs: tokens of prompt and response.
      response_mask: 1 at tokens the policy wrote (they are what is trained), else 0. Index t marks token t itself.
      sampled_logprobs: log-probability of token t under exactly the distribution it was drawn from (temperature and
        filters), 0 outside the response.
      plain_logprobs: the same under the temperature alone, without filters.
      sample_id: number of the sample, unique in the run; the random key of a token is a function of
        (seed, sample_id, position).
      group: rows that answer the same prompt share a group number (within this rollout, from 0).
      version: optimizer step of the weights that sampled the row; the first of them where several did.
      ended: whether the row ended by a stop token or stop string; False when it was cut by the length limit.
      kept: bit v of token t says whether vocabulary entry v survived the filters when t was drawn
        (little-endian bits), so that scoring can use the same support; None when sampling was unfiltered.
    """

    inputs: Inputs
    response_mask: Float[Array, "B T"]
    sampled_logprobs: Float[Array, "B T"]
    plain_logprobs: Float[Array, "B T"]
    sample_id: Int[Array, "B"]
    group: Int[Array, "B"]
    version: Int[Array, "B"]
    ended: Bool[Array, "B"]
    kept: UInt8[Array, "B T V8"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Scores of a language model: value t belongs to token t (0 at t = 0 and at padding)."""

    logprobs: Float[Array, "*B T"]
    entropy: Float[Array, "*B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """A critic's value at token t is its estimate before token t is written (read from hidden state t - 1)."""

    values: Float[Array, "*B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """The K largest logits at each token, with their ids."""

    logits: Float[Array, "*B T K"]
    ids: Int[Array, "*B T K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Outputs of a scalar head: value t is read from token t itself, having seen it and what is before it."""

    scores: Float[Array, "*B T Y"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsAt:
    """What a language model says of given vocabulary entries at each token; value t belongs to token t.

    Attributes:
      logits: of the entries.
      log_sum_exp: over the whole vocabulary.
      logprobs: of token t itself.
    """

    logits: Float[Array, "*B T K"]
    log_sum_exp: Float[Array, "*B T"]
    logprobs: Float[Array, "*B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Divergences:
    """How far a language model is from its teacher at each token, in nats, and its log-probability of token t."""

    divergence: Float[Array, "*B T"]
    logprobs: Float[Array, "*B T"]


# Rows that data gives offline algorithms. In all of them ``weight`` is 1 for a row of data (or its share in the mean)
# and 0 for padding, which is zeros throughout and adds exactly 0 to losses and metrics. Rows are padded on the right,
# and hold one document each unless said otherwise.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextRows:
    """Texts to imitate. A row may hold several packed documents, told apart by ``inputs.segments``.

    Attributes:
      inputs: the documents.
      mask: 1 at tokens that are trained. Token t is predicted from t - 1 of its document, so a document's first token
        never counts, whatever the mask says.
      weight: of the row, for all its documents.
    """

    inputs: Inputs
    mask: Float[Array, "B T"]
    weight: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairRows:
    """Two responses to one prompt: index 0 of the second axis is the chosen one, index 1 the rejected one.

    Attributes:
      inputs: prompt and response, ``[B, 2, T]``.
      mask: 1 at tokens of the response, its end included.
      gap: by how much the chosen response is better (difference of ground-truth rewards, strength of the preference or
        margin, not negative); 0 where unknown. The algorithm's ``needs_gap(hyper)`` says whether it is read.
      weight: of the pair.
    """

    inputs: Inputs
    mask: Float[Array, "B 2 T"]
    gap: Float[Array, "B"]
    weight: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnpairedRows:
    """A prompt with a response that is wanted or not; and, to estimate a divergence, with a response to another prompt.

    Index 0 of the second axis is the row's own response, index 1 the same prompt with the response of another row, by
    a fixed rotation of the data (at least 2 rows), so that scores of a frozen model can be kept between epochs.

    Attributes:
      inputs: prompt and response, ``[B, 2, T]``.
      mask: 1 at tokens of the response, its end included.
      desirable: whether the row's own response is wanted.
      weight: of the row.
    """

    inputs: Inputs
    mask: Float[Array, "B 2 T"]
    desirable: Bool[Array, "B"]
    weight: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LabelRows:
    """Texts with attributes in numbers, one for each output of the reward model.

    Attributes:
      inputs: prompt and response; attributes are read at the last token.
      labels: the attributes; what stands where the mask is 0 does not matter.
      label_mask: 1 where the attribute is known (or its weight), else 0.
      weight: of the row.
    """

    inputs: Inputs
    labels: Float[Array, "B Y"]
    label_mask: Float[Array, "B Y"]
    weight: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRows:
    """Texts whose steps are judged one by one.

    Attributes:
      inputs: prompt and steps.
      labels: at a step's last token, from 0 (wrong) to 1 (right); what stands elsewhere does not matter.
      mask: 1 at the last token of each step that has a label.
      weight: of the row.
    """

    inputs: Inputs
    labels: Float[Array, "B T"]
    mask: Float[Array, "B T"]
    weight: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopKRows:
    """Texts with a teacher's largest logits; may be packed as ``TextRows``.

    Value t of the teacher is its opinion of token t, given what is before it. Files that store it where it was
    computed, at token t - 1, are shifted by one when they are read.

    Attributes:
      inputs: the documents.
      mask: 1 at tokens that are trained.
      topk: the teacher's K largest logits and their ids, all different at one token.
      log_sum_exp: of the teacher's logits over the whole vocabulary.
      weight: of the row.
    """

    inputs: Inputs
    mask: Float[Array, "B T"]
    topk: TopK
    log_sum_exp: Float[Array, "B T"]
    weight: Float[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an optimizer step reads and writes.

    Attributes:
      step: optimizer steps taken; schedules follow it.
      params: nested dict of arrays.
      opt: optax state.
      skipped: updates skipped for a non-finite loss or gradient since the start.
      skipped_in_row: the same, since the last good update.
    """

    step: Int[Array, ""]
    params: Params
    opt: PyTree
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class MediaItem:
    """One image, audio or video, as its tower reads it (host side). It stays with the controller that read it.

    Attributes:
      kind: what it is.
      grid: of patches in time, height and width; of audio ``(1, 1, frames)``, the frames that are not silence after it.
      tokens: features that the tower makes of it, and places that it takes in a text.
      seconds: of a video, from one step of the grid in time to the next; 0 otherwise.
      digest: the same for two items with the same values.
      load: makes the values anew.
      preview: makes a small copy for reports, as its MIME type and bytes.
      kept: the values; None where they are made each time.
    """

    kind: Literal["image", "audio", "video"]
    grid: tuple[int, int, int]
    tokens: int
    seconds: float
    digest: str
    load: Callable[[], Float[np.ndarray, "P F"]] = dataclasses.field(repr=False, compare=False)
    preview: Callable[[], tuple[str, bytes]] = dataclasses.field(repr=False, compare=False)
    kept: Float[np.ndarray, "P F"] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def values(self) -> Float[np.ndarray, "P F"]:
        """Of an image or video its patches in the order of the tower; of audio its frames, and a few of silence."""
        return self.load() if self.kept is None else self.kept

    def light(self) -> MediaItem:
        """The item without its values, for what is kept long and read seldom."""
        return dataclasses.replace(self, kept=None)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt record after reading (host side).

    Attributes:
      messages: chat turns ``{"role", "content"}``; empty when the record held plain text. A content is a string or,
        where there are media in it, a list of parts ``{"type", ...}``.
      text: the rendered prompt, exactly what was tokenized, with one placeholder for each medium.
      tokens: its ids, with as many placeholders as the media have features.
      columns: every further column of the record, for the reward.
      source: "file:line" of the record, for messages.
      index: number of the record in its data set.
      media: images, audios and videos in the order of their places in ``tokens``.
      answer: token ids of the record's own answer, its end included, where the algorithm compares with it; else empty.
    """

    messages: list[dict[str, Any]]
    text: str
    tokens: list[int]
    columns: Mapping[str, Any]
    source: str
    index: int
    media: tuple[MediaItem, ...] = ()
    answer: tuple[int, ...] = ()

    @property
    def identity(self) -> str:
        """The same for two prompts that ask the same: text and media."""
        return "\0".join([self.text, *(item.digest for item in self.media)])


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion (host side): what rewards, sample tables and reports read.

    Attributes:
      prompt: the prompt it answers; ``prompt.columns`` holds the record's further columns.
      completion: decoded response without special tokens, cut before a stop string.
      tokens: sampled ids, the stop token included.
      finish: "stop" (stop token), "stop_string", "length", or "invalid" (the logits were NaN or infinite).
      sample_id: unique in the run.
      group: rows that answer the same prompt share it.
    """

    prompt: Prompt
    completion: str
    tokens: list[int]
    finish: str
    sample_id: int
    group: int
