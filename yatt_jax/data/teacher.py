"""Records with a teacher's largest logits, for distillation."""

from __future__ import annotations

from typing import Any

import numpy as np

from yatt_jax.data.config import DataError
from yatt_jax.data.dialogues import field
from yatt_jax.data.examples import Reading, Teacher
from yatt_jax.data.records import Record


def topk_logits(record: Record, how: Reading) -> Teacher:
    """``{"tokens", "labels", "loss_mask", "topk_logits", "topk_token_ids", "log_sum_exp_logits"}``.

    In the file, place t holds what the teacher said after ``tokens[t]``, about ``labels[t]``, the token that follows;
    here it goes to the place of that token, one later. What follows the last trained token is left out.

    Raises:
      DataError: a wrong type or length, labels that are not the tokens that follow, an entry twice, or nothing trained.
    """
    tokens, labels, loss_mask = (_array(record, name, 1) for name in ("tokens", "labels", "loss_mask"))
    logits, ids = _array(record, "topk_logits", 2), _array(record, "topk_token_ids", 2)
    normalizer = _array(record, "log_sum_exp_logits", 1)
    for name in ("labels", "loss_mask", "topk_logits", "topk_token_ids", "log_sum_exp_logits"):
        found = len(record.fields[name])
        if found != len(tokens):
            raise DataError(f'{field(record, name)}: {found} entries, and "tokens" has {len(tokens)}')
    if logits.shape != ids.shape:
        raise DataError(
            f'{field(record, "topk_token_ids")}: {ids.shape[1]} a token, "topk_logits" has {logits.shape[1]}'
        )
    trained = np.flatnonzero(loss_mask)
    if not len(trained):
        raise DataError(f"{field(record, 'loss_mask')}: no token is trained")
    size = int(trained[-1]) + 1
    wrong = np.flatnonzero(labels[: size - 1] != tokens[1:size])
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{field(record, 'labels')}: entry {at + 1} is {labels[at]:g}, and the token that follows "
            f"is {tokens[at + 1]:g}"
        )
    for name, values in (("tokens", tokens), ("labels", labels[:size]), ("topk_token_ids", ids[:size])):
        if values.min() < 0 or np.any(values != np.floor(values)):
            raise DataError(f"{field(record, name)}: expected token ids, found {values.min():g} among them")
    for at in trained.tolist():
        if len(set(ids[at].tolist())) != ids.shape[1]:
            raise DataError(f"{field(record, 'topk_token_ids')}, entry {at + 1}: a token is there twice")
        if np.any(logits[at] > normalizer[at] + 1e-3):
            raise DataError(f"{field(record, 'log_sum_exp_logits')}, entry {at + 1}: below one of the token's logits")

    def later(values: np.ndarray, dtype: type) -> Any:
        """Values of a place moved to the token that they are about; the first token has none."""
        return np.concatenate([np.zeros_like(values[:1]), values[:size]]).astype(dtype)

    return Teacher(
        tokens=np.append(tokens[:size], labels[size - 1]).astype(np.int32),
        mask=later(loss_mask != 0, bool),
        logits=later(logits, np.float32),
        ids=later(ids, np.int32),
        log_normalizer=later(normalizer, np.float32),
        source=record.source,
    )


def _array(record: Record, name: str, axes: int) -> np.ndarray:
    expected = "a list of numbers" if axes == 1 else "a list of lists of numbers, all of one length"
    try:
        values = np.asarray(record.fields[name], np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(f"{field(record, name)}: expected {expected}: {error}") from error
    if values.ndim != axes or not values.size or not np.all(np.isfinite(values)):
        raise DataError(f"{field(record, name)}: expected {expected}, finite and not empty; found axes {values.shape}")
    return values
