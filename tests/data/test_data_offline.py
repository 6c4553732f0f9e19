"""Which rows a step has: every row once an epoch, for any number of processes, packed or not, and after going on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from yatt_jax.data.config import DataError, SourceConfig
from yatt_jax.data.offline import OfflineConfig, OfflineSource
from yatt_jax.errors import InputError
from yatt_jax.types import PairRows, TextRows, UnpairedRows

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = [{"prompt": letter, "completion": letter * (1 + i % 5)} for i, letter in enumerate(LETTERS)]  # 26 rows
UNPAIRED = [{"prompt": letter, "completion": letter * 2, "label": i % 2 == 0} for i, letter in enumerate(LETTERS)]


@pytest.fixture
def source(write, plain_tokenizer):
    """Opens the rows, as one process of several."""
    file = {TextRows: write("texts.jsonl", TEXTS), UnpairedRows: write("unpaired.jsonl", UNPAIRED)}

    def open_(process: int = 0, count: int = 1, kind: Any = TextRows, seed: int = 0, **settings: Any) -> OfflineSource:
        settings = {"train": (SourceConfig(file.get(kind, file[TextRows])),), "batch": 6, "max_tokens": 16} | settings
        config = OfflineConfig(**settings)
        return OfflineSource(config, plain_tokenizer, kind, seed=seed, process_index=process, process_count=count)

    return open_


def drawn(source: OfflineSource, steps: int) -> list[list[int]]:
    """Numbers of the records of each step, in order."""
    return [sorted(number for row in source.draw().numbers for number in row) for _ in range(steps)]


def test_every_row_comes_once_an_epoch_and_each_epoch_in_another_order(source) -> None:
    one = source()
    assert one.steps_per_epoch == 5
    steps = drawn(one, 10)
    assert [len(step) for step in steps] == [6, 6, 6, 6, 2] * 2
    for epoch in (steps[:5], steps[5:]):
        assert sorted(number for step in epoch for number in step) == list(range(26))
    assert steps[:5] != steps[5:]
    assert drawn(source(), 5) == steps[:5]
    assert drawn(source(seed=1), 5) != steps[:5]
    dropped = drawn(source(last="drop"), 8)
    assert [len(step) for step in dropped] == [6] * 8
    assert drawn(source(shuffle=False), 5) == [list(range(i, min(i + 6, 26))) for i in range(0, 26, 6)]


@pytest.mark.parametrize("kind", [TextRows, UnpairedRows])
def test_a_step_has_the_same_rows_for_any_number_of_processes_packed_or_not(source, kind: Any) -> None:
    alone = drawn(source(kind=kind), 7)
    for count in (2, 3, 8):
        parts = [drawn(source(process, count, kind), 7) for process in range(count)]
        assert [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)] == alone
    if kind is TextRows:
        packed = source(pack=24)
        assert drawn(packed, 7) == alone


def test_packed_rows_hold_what_the_rows_hold(source) -> None:
    plain, packed = source().draw(), source(pack=24).draw()
    assert plain.shape[0] == 6
    assert packed.shape[0] < 6
    one, other = plain.collate(), packed.collate()
    assert isinstance(one, TextRows)
    assert isinstance(other, TextRows)
    for rows in (one, other):
        assert np.all((rows.mask > 0) <= (rows.inputs.segments > 0))
        assert np.all(rows.inputs.positions[rows.inputs.segments == 0] == 0)
    assert one.mask.sum() == other.mask.sum()
    ids = [np.sort(np.asarray(rows.inputs.tokens)[np.asarray(rows.mask) > 0]) for rows in (one, other)]
    np.testing.assert_array_equal(ids[0], ids[1])
    assert (np.asarray(other.inputs.positions) == 0).sum() >= 6  # each document counts from 0


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1)])
def test_going_on_with_another_number_of_processes(source, before: int, after: int) -> None:
    whole = drawn(source(), 9)
    first = [source(process, before) for process in range(before)]
    for one in first:
        drawn(one, 4)
    states = [one.state() for one in first]
    then = [source(process, after) for process in range(after)]
    for one in then:
        one.restore(states)
    parts = [drawn(one, 5) for one in then]
    assert [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)] == whole[4:]


def test_what_it_does_not_go_on_with(source) -> None:
    states = [source(process, 2).state() for process in (0, 1)]
    with pytest.raises(DataError, match="batch was 6 when the run was saved and is now 5"):
        source(batch=5).restore(states)
    with pytest.raises(DataError, match="seed was 0"):
        source(seed=1).restore(states)
    with pytest.raises(DataError, match=r"states of processes \[1\] are not there"):
        source().restore(states[:1])


def test_held_out_rows_are_never_trained_on_and_each_is_measured_once(source) -> None:
    one = source(holdout=7)
    held_out = [number for draw in one.evaluation() for row in draw.numbers for number in row]
    assert len(set(held_out)) == len(held_out) == 7
    assert not set(held_out) & {number for step in drawn(one, 12) for number in step}
    for count in (2, 5):
        parts = [list(source(process, count, holdout=7).evaluation()) for process in range(count)]
        assert len({len(part) for part in parts}) == 1
        found = [number for part in parts for draw in part for row in draw.numbers for number in row]
        assert sorted(found) == sorted(held_out)
    assert len([row for draw in one.evaluation(limit=3) for row in draw.numbers if row]) == 3
    assert all(len(row) <= 1 for draw in source(holdout=7, pack=24).evaluation() for row in draw.rows)


def test_sources_are_mixed_by_weight(write, source) -> None:
    more = write("more.jsonl", [{"prompt": "x", "completion": "y" * n} for n in (1, 2, 3)])
    one = source(train=(SourceConfig(write("texts.jsonl", TEXTS)), SourceConfig(more, 3.0)), mix="weights")
    numbers = [number for step in drawn(one, 40) for number in step]
    assert len(numbers) == 240
    assert sum(number >= 26 for number in numbers) == pytest.approx(180, abs=6)


def test_unpaired_rows_bring_the_same_other_response_in_every_epoch(source) -> None:
    others: dict[int, set[bytes]] = {}
    one = source(kind=UnpairedRows)
    for _ in range(10):
        for row in one.draw().rows:
            for encoded in row:
                own, other = encoded.documents
                assert not np.array_equal(own.tokens, other.tokens)
                assert own.tokens[0] == other.tokens[0]
                others.setdefault(encoded.index, set()).add(other.tokens.tobytes())
    assert len(others) == 26
    assert {len(seen) for seen in others.values()} == {1}


def test_what_is_refused(source, write) -> None:
    with pytest.raises(DataError, match=r"data\.train is empty"):
        source(train=())
    with pytest.raises(InputError, match="UnpairedRows are not packed"):
        source(kind=UnpairedRows, pack=32)
    with pytest.raises(DataError, match="26 rows make no batch of 40"):
        source(batch=40, last="drop")
    with pytest.raises(DataError, match="holdout = 26 leaves nothing"):
        source(holdout=26)
    with pytest.raises(DataError, match=r"texts.jsonl:1"):
        source(kind=PairRows)
    with pytest.raises(DataError, match=r"bad.jsonl:2.*on_error='skip' would leave out"):
        source(train=(SourceConfig(write("bad.jsonl", [TEXTS[0], {"prompt": "a"}, TEXTS[1]])),))


def test_rows_left_out_are_counted_and_leave_their_place_empty(source, write, caplog) -> None:
    rows = [*TEXTS[:4], {"prompt": "a"}, {"prompt": "b", "completion": "b" * 30}]
    one = source(train=(SourceConfig(write("rows.jsonl", rows)),), on_error="skip")
    for epoch in (1, 2):
        draw = one.draw()
        assert sorted(map(len, draw.rows)) == [0, 0, 1, 1, 1, 1]
        assert one.skipped["malformed"] == one.skipped["overlong"] == epoch
    weight = np.asarray(draw.collate().weight)
    assert sorted(weight.tolist()) == [0, 0, 1, 1, 1, 1]
    assert sum("left out" in record.message for record in caplog.records) >= 2
