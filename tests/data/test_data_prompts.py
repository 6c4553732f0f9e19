"""The prompt source: order, shards, resume, weights, held-out rows, and what is skipped."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from typing import Any

import pytest

from yatt_jax.data.config import DataError, SourceConfig
from yatt_jax.data.prompts import DataConfig, PromptSource


def records(count: int, prefix: str = "p") -> list[dict[str, Any]]:
    return [{"prompt": f"{prefix}{i}", "answer": i} for i in range(count)]


@pytest.fixture
def source(write, plain_tokenizer):
    """Makes sources over ``rows`` records, or over given paths."""

    def make(rows: int = 23, *, batch: int = 4, process=(0, 1), seed: int = 0, **settings: Any) -> PromptSource:
        if "train" not in settings:
            settings["train"] = (SourceConfig(write(f"rows{rows}.jsonl", records(rows))),)
        return PromptSource(
            DataConfig(**settings),
            plain_tokenizer,
            prompts_per_step=batch,
            seed=seed,
            process_index=process[0],
            process_count=process[1],
        )

    return make


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


def steps(source: PromptSource, count: int) -> list[list[str]]:
    return [texts(next(source)) for _ in range(count)]


def test_each_epoch_has_each_row_once_and_another_order(source):
    drawn = list(itertools.chain(*steps(source(24), 18)))
    epochs = [drawn[i : i + 24] for i in (0, 24, 48)]
    assert all(sorted(epoch) == sorted(f"p{i}" for i in range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != sorted(epochs[0], key=lambda t: int(t[1:]))


def test_order_follows_the_seed(source):
    assert steps(source(seed=3), 9) == steps(source(seed=3), 9)
    assert steps(source(seed=3), 9) != steps(source(seed=4), 9)


def test_seeds_that_follow_each_other_share_no_epochs(source):
    """Shuffling epoch e by seed + e would make the second epoch of seed 0 the first of seed 1."""
    of_seed = {seed: list(itertools.chain(*steps(source(12, seed=seed), 9))) for seed in (0, 1, 2)}
    epochs = [tuple(drawn[i : i + 12]) for drawn in of_seed.values() for i in (0, 12, 24)]
    assert len(set(epochs)) == len(epochs)


def test_without_shuffling_the_order_is_the_file_s(source):
    assert steps(source(6, shuffle=False), 3) == [
        ["p0", "p1", "p2", "p3"],
        ["p4", "p5", "p0", "p1"],
        ["p2", "p3", "p4", "p5"],
    ]


def test_columns_sources_and_numbers_reach_the_prompt(source):
    draw = source(6, shuffle=False).draw()
    first = draw.prompts[2]
    assert first.columns == {"answer": 2}
    assert first.source.endswith("rows6.jsonl:3")
    assert first.index == 2
    assert draw.numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("processes", [2, 3, 4, 7])
@pytest.mark.parametrize("overlong", [False, True])
def test_the_order_does_not_depend_on_the_number_of_processes(source, processes, overlong):
    settings: dict[str, Any] = {"batch": 5, "max_prompt_tokens": 2 if overlong else 9}
    alone = source(23, **settings)
    shares = [source(23, **settings, process=(p, processes)) for p in range(processes)]
    for _ in range(14):
        whole = alone.draw()
        parts = [share.draw() for share in shares]
        assert [t for part in parts for t in texts(part.prompts)] == texts(whole.prompts)
        assert [n for part in parts for n in part.numbers] == whole.numbers
    assert sum((Counter(share.skipped) for share in shares), Counter()) == +Counter(alone.skipped)
    assert (alone.skipped["overlong"] > 10) == overlong


def test_no_process_reads_another_s_rows(source, monkeypatch):
    from yatt_jax.data import records as readers

    shares = [source(40, batch=8, process=(p, 4), check_rows=0) for p in range(4)]
    rows: list[int] = []
    plain = readers.JsonLines.__getitem__
    monkeypatch.setattr(readers.JsonLines, "__getitem__", lambda self, row: rows.append(row) or plain(self, row))
    seen = []
    for share in shares:
        rows.clear()
        steps(share, 5)  # one epoch
        seen.append(set(rows))
    assert [len(rows) for rows in seen] == [10] * 4
    assert set.union(*seen) == set(range(40))


def test_more_processes_than_prompts(source):
    shares = [source(5, batch=2, process=(p, 4)) for p in range(4)]
    assert sorted(len(next(share)) for share in shares) == [0, 0, 1, 1]


def test_fewer_rows_than_a_batch(source):
    drawn = steps(source(3, batch=8), 3)
    assert Counter(itertools.chain(*drawn)) == {"p0": 8, "p1": 8, "p2": 8}
    assert all(len(batch) == 8 for batch in drawn)


def test_draws_of_any_size_follow_one_sequence(source):
    sizes = [1, 7, 4, 0, 9, 3]
    mixed = source(23)
    drawn = [mixed.draw(size) for size in sizes]
    assert [len(draw.prompts) for draw in drawn] == sizes
    assert [n for draw in drawn for n in draw.numbers] == list(range(24))
    assert list(itertools.chain(*(texts(draw.prompts) for draw in drawn))) == list(
        itertools.chain(*steps(source(23), 6))
    )


@pytest.mark.parametrize("at", [0, 1, 3, 6, 11])
def test_resume_is_exact(source, at):
    whole = source(23, max_prompt_tokens=2)
    expected = steps(whole, 16)
    first = source(23, max_prompt_tokens=2)
    steps(first, at)
    state = json.loads(json.dumps(first.state()))
    again = source(23, max_prompt_tokens=2)
    steps(again, 2)  # whatever it drew before
    again.restore([state])
    assert steps(again, 16 - at) == expected[at:]
    assert again.skipped == whole.skipped


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 3), (3, 5)])
def test_resume_on_another_number_of_processes(source, before, after):
    settings: dict[str, Any] = {"batch": 6, "max_prompt_tokens": 2}
    expected = steps(source(23, **settings), 12)
    old = [source(23, **settings, process=(p, before)) for p in range(before)]
    for share in old:
        steps(share, 5)  # inside an epoch
    states = json.loads(json.dumps([share.state() for share in old]))
    new = [source(23, **settings, process=(p, after)) for p in range(after)]
    for share in new:
        share.restore(states)
    assert sum((Counter(share.skipped) for share in new), Counter()) == sum(
        (Counter(s.skipped) for s in old), Counter()
    )
    for step in range(5, 12):
        assert [t for share in new for t in texts(next(share))] == expected[step]


def test_resume_refuses_what_would_not_be_exact(source):
    state = source(23).state()
    for settings, message in (
        ({"seed": 1}, "seed was 0 when the run was saved and is now 1"),
        ({"rows": 24}, r"rows was \[23\] when the run was saved and is now \[24\]"),
        ({"batch": 5}, "prompts_per_step was 4"),
        ({"shuffle": False}, "shuffle was True"),
        ({"holdout": 2}, "holdout was 0"),
    ):
        with pytest.raises(DataError, match=message):
            source(**{"rows": 23, **settings}).restore([state])
    half = source(23, process=(0, 2)).state()
    with pytest.raises(DataError, match=r"no saved state covers lanes \[2, 3\]"):
        source(23).restore([half])
    later = source(23, process=(1, 2))
    next(later)
    with pytest.raises(DataError, match=r"the processes had drawn \[0, 4\] prompts"):
        source(23).restore([half, later.state()])


def test_weights(source, write):
    train = (
        SourceConfig(write("a.jsonl", records(5, "a")), 3.0),
        SourceConfig(write("b.parquet", records(50, "b")), 1.0),
    )
    drawn = list(itertools.chain(*steps(source(train=train), 100)))
    assert Counter(text[0] for text in drawn) == {"a": 300, "b": 100}
    assert set(Counter(text for text in drawn if text[0] == "a").values()) == {60}
    assert set(Counter(text for text in drawn if text[0] == "b").values()) == {2}
    both = source(train=train, process=(0, 1)).draw(40).prompts
    assert len({prompt.index for prompt in both if prompt.text[0] == "b"} & {0, 1, 2, 3, 4}) == 0  # numbers are unique


@pytest.mark.parametrize(
    ("path", "weight"), [("", 1.0), ("a.jsonl", 0.0), ("a.jsonl", float("nan")), ("a.jsonl", float("inf"))]
)
def test_wrong_sources(path, weight):
    with pytest.raises(ValueError, match=r"path is empty|must be a positive number"):
        SourceConfig(path, weight)


def test_held_out_rows_are_never_trained_on(source, write):
    twice = [*records(30), *records(30)]  # every prompt is there twice
    train = (SourceConfig(write("twice.jsonl", twice)), SourceConfig(write("more.jsonl", records(20, "q"))))
    one = source(train=train, holdout=12, batch=8)
    held = one.evaluation()
    assert len(held) == 12
    drawn = set(itertools.chain(*steps(one, 40)))
    assert not drawn & set(texts(held))
    assert drawn | set(texts(held)) == {f"p{i}" for i in range(30)} | {f"q{i}" for i in range(20)}
    assert one.skipped["held_out"] > 0
    other = source(train=train, holdout=12, batch=8, seed=9, process=(1, 2))
    assert texts(other.evaluation()) == texts(held)[6:]  # the same rows, whatever the seed


@pytest.mark.parametrize("holdout", [23, 40])
def test_a_holdout_that_leaves_nothing(source, holdout):
    with pytest.raises(DataError, match=rf"data\.holdout = {holdout} leaves nothing of the 23 rows"):
        source(23, holdout=holdout)


def test_evaluation_has_every_row_once_over_all_processes(source, write):
    paths = (write("e1.jsonl", records(7, "e")), write("e2.json", records(6, "f")))
    for processes in (1, 2, 5, 16):
        shares = [source(eval=paths, process=(p, processes)).evaluation() for p in range(processes)]
        assert [p.text for share in shares for p in share] == [f"e{i}" for i in range(7)] + [f"f{i}" for i in range(6)]
        assert len({p.index for share in shares for p in share}) == 13
    assert texts(source(eval=paths).evaluation(5)) == ["e0", "e1", "e2", "e3", "e4"]
    assert source().evaluation() == []


def test_overlong_prompts_are_counted_and_said_once(source, caplog):
    one = source(23, max_prompt_tokens=2)
    with caplog.at_level(logging.WARNING):
        drawn = list(itertools.chain(*steps(one, 15)))
    assert set(drawn) == {f"p{i}" for i in range(10)}
    assert len(drawn) == 60
    assert one.skipped["overlong"] > 20
    said = [r.getMessage() for r in caplog.records if "max_prompt_tokens" in r.getMessage()]
    assert len(said) == 1
    assert "a prompt of 3 tokens, and data.max_prompt_tokens is 2 (skipped, as data.overlong says;" in said[0]


def test_overlong_cut_and_error(source):
    one = source(23, max_prompt_tokens=2, overlong="cut")
    drawn = list(itertools.chain(*steps(one, 12)))
    assert {t for t in drawn if t[0] != "p"} == {str(i) for i in range(10, 23)}
    assert one.skipped == {"malformed": 0, "overlong": 0, "cut": sum(t[0] != "p" for t in drawn), "held_out": 0}
    with pytest.raises(
        DataError, match=r"rows23\.jsonl:\d+: a prompt of 3 tokens.*set data\.overlong to 'skip' or 'cut'"
    ):
        steps(source(23, max_prompt_tokens=2, overlong="error"), 6)


def test_nothing_that_fits_ends_with_a_message(source, write):
    mixed = [{"prompt": "ok"}, {"prompt": "ok"}, {"prompt": "long"}, {"prompt": "long"}] * 3
    with pytest.raises(DataError, match=r"rows one after the other cannot be used; the last: .*max_prompt_tokens is 1"):
        next(source(23, max_prompt_tokens=1))
    # Without shuffling, a place of the batch always meets the same rows, and here two of four meet long ones alone.
    with pytest.raises(DataError, match=r"data\.shuffle=True would offer"):
        next(source(max_prompt_tokens=2, shuffle=False, train=(SourceConfig(write("alternating.jsonl", mixed)),)))


def test_malformed_records(source, tmp_path, caplog):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": }\n{"prompt": "c"}\n{"question": "d"}\n{"prompt": "e"}\n')
    train = (SourceConfig(str(file)),)
    with pytest.raises(DataError, match=r"bad\.jsonl:2, column 12: malformed JSON.*data\.on_error='skip' would"):
        source(train=train)  # before anything is drawn
    with caplog.at_level(logging.WARNING):
        one = source(train=train, on_error="skip")
        drawn = Counter(itertools.chain(*steps(one, 6)))
    assert set(drawn) == {"a", "c", "e"}
    assert drawn.total() == 24
    assert 10 <= one.skipped["malformed"] <= 24  # two rows of five
    assert [r.getMessage().split(":")[0] for r in caplog.records][:1] == [
        "2 of 5 records checked will be skipped; the first"
    ]
    assert sum("further ones are counted" in r.getMessage() for r in caplog.records) == 1


def test_later_records_are_checked_when_drawn(source, tmp_path):
    file = tmp_path / "late.jsonl"
    file.write_text('{"prompt": "a"}\n' * 9 + "{\n")
    one = source(train=(SourceConfig(str(file)),), check_rows=5)
    with pytest.raises(DataError, match=r"late\.jsonl:10, column 2: malformed JSON"):
        steps(one, 3)


def test_all_records_bad(source, write):
    train = (SourceConfig(write("a.jsonl", [{"question": 1}] * 3)),)
    with pytest.raises(DataError, match=r"none of 3 records checked can be used; the first: .*a\.jsonl:1: no prompt"):
        source(train=train, on_error="skip")


def test_a_bad_evaluation_record_stops_before_the_run(source, write):
    with pytest.raises(DataError, match=r"e\.jsonl:2: no prompt among the fields"):
        source(eval=(write("e.jsonl", [{"prompt": "a"}, {"ask": "b"}]),))


def test_a_template_that_fails_is_found_before_the_run(write, chat_tokenizer):
    path = write("a.jsonl", [{"prompt": [{"role": "user", "content": "a"}] * 2}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template failed"):
        PromptSource(DataConfig(train=(SourceConfig(path),)), chat_tokenizer, prompts_per_step=1)


def test_no_training_data(plain_tokenizer):
    with pytest.raises(DataError, match=r"data\.train is empty"):
        PromptSource(DataConfig(), plain_tokenizer, prompts_per_step=1)
