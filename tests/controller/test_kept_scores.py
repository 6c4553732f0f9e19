"""Scores kept by record, in memory and in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from yatt_jax.controller.kept_scores import KeptScores


def test_what_is_put_is_found_and_the_first_counts(tmp_path: Path) -> None:
    kept = KeptScores(6)
    assert not kept.have(np.array([1]))
    kept.put(np.array([4, -1, 1]), np.array([[4.0, 4], [9, 9], [1, 1]]))
    assert kept.have(np.array([1, 4, -1]))
    assert not kept.have(np.array([1, 2]))
    kept.put(np.array([1, 2]), np.array([[7.0, 7], [2, 2]]))
    np.testing.assert_array_equal(kept.get(np.array([2, -1, 1, 4])), [[2, 2], [0, 0], [1, 1], [4, 4]])


def test_files_outlast_the_process_and_only_the_writer_makes_them(tmp_path: Path) -> None:
    file = tmp_path / "scores" / "reference-1"
    writer, reader = KeptScores(5, file), KeptScores(5, file, writes=False)
    for one in (reader, writer):
        one.put(np.array([0, 3]), np.array([0.1, 0.3], np.float32))
        assert file.with_suffix(".npy").exists() == (one is writer)
    later = KeptScores(5, file)
    assert later.have(np.array([3, 0]))
    assert not later.have(np.array([1]))
    later.put(np.array([1]), np.array([0.25], np.float32))
    last = KeptScores(5, file, writes=False)
    np.testing.assert_array_equal(last.get(np.array([0, 1, 3])), np.array([0.1, 0.25, 0.3], np.float32))
    assert not KeptScores(6, file).have(np.array([0]))  # of another data set
