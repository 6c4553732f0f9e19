"""Every format of rows: what is read of a record, and what is said of a record that does not fit."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

from yatt_jax.data.config import DataError
from yatt_jax.data.examples import Chat, Pair, Plain, Rated, Reading, Steps, Teacher, Unpaired
from yatt_jax.data.formats import FORMATS, Parser
from yatt_jax.errors import InputError
from yatt_jax.types import LabelRows, PairRows, StepRows, TextRows, TopKRows, UnpairedRows

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
SAY_NO = {"role": "assistant", "content": "no"}
NEMO = {
    "system": "be kind",
    "conversations": [
        {"from": "User", "value": "hi", "label": None},
        {"from": "Assistant", "value": "yes", "label": "quality:4,humor:0"},
    ],
    "mask": "User",
    "type": "VALUE_TO_TEXT",
}
TOPK = {
    "tokens": [5, 6, 7, 0],
    "labels": [6, 7, 8, 0],
    "loss_mask": [0, 1, 1, 0],
    "topk_logits": [[9.0, 1.0], [2.0, 1.0], [4.0, 3.0], [0.0, 0.0]],
    "topk_token_ids": [[1, 2], [7, 3], [8, 5], [0, 0]],
    "log_sum_exp_logits": [9.5, 2.5, 4.5, 1.0],
}


@pytest.fixture
def parse(write):
    """Writes records, and parses the rows that they make up."""

    def all_of(kind, records: list[Any], *, name: str = "rows.jsonl", format: str = "auto", wrap: bool = False):
        parser = Parser(kind, format, Reading(wrap))
        table = parser.open(write(name, records))
        return [parser.parse(table[i]) for i in range(len(table))]

    return all_of


def one(parse, kind, record, **settings):
    (example,) = parse(kind, [record], **settings)
    return example


def test_texts(parse):
    chat = one(parse, TextRows, {"messages": [ASK, SAY, ASK, SAY_NO]})
    assert chat.turns == [ASK, SAY, ASK, SAY_NO]
    assert chat.learn == [False, True, False, True]
    assert chat.source.endswith("rows.jsonl:1")
    for prompt, answer in (("prompt", "completion"), ("input", "output")):
        record = {prompt: "hi", answer: "yes"}
        plain = one(parse, TextRows, record)
        assert (plain.prompt, plain.answer) == ("hi", "yes")
        wrapped = one(parse, TextRows, record, wrap=True)
        assert (wrapped.turns, wrapped.learn) == ([ASK, SAY], [False, True])
    # An assistant's turn in the prompt is not learned, one in the completion is.
    turns = one(parse, TextRows, {"prompt": [ASK, SAY, ASK], "completion": [SAY_NO]})
    assert turns.learn == [False, False, False, True]
    assert one(parse, TextRows, {"prompt": [ASK], "completion": "yes"}).turns == [ASK, SAY]
    assert isinstance(one(parse, TextRows, {"text": "all of it"}), Plain)


def test_speakers(parse):
    shared = one(
        parse,
        TextRows,
        {
            "conversations": [
                {"from": "system", "value": "be kind"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "yes"},
            ]
        },
    )
    assert [turn["role"] for turn in shared.turns] == ["system", "user", "assistant"]
    assert shared.learn == [False, False, True]
    assert shared.labels == []


def test_nemo_chat(parse):
    chat = one(parse, TextRows, NEMO)
    assert chat.turns == [{"role": "system", "content": "be kind"}, ASK, SAY]
    assert chat.learn == [False, False, True]
    assert chat.labels == ["", "", "quality:4,humor:0"]
    # Without VALUE_TO_TEXT nothing is conditioned on the labels.
    assert one(parse, TextRows, {**NEMO, "type": None}).labels == []
    # Who is masked is told by name, whatever it is.
    turns = [{"from": "Ann", "value": "hi"}, {"from": "Bob", "value": "yes"}]
    named = one(parse, TextRows, {"conversations": turns, "mask": "Ann", "system": ""})
    assert (named.turns, named.learn) == ([ASK, SAY], [False, True])
    other = one(parse, TextRows, {**NEMO, "mask": "Assistant", "type": None})
    assert other.learn == [False, True, False]


def test_pairs(parse):
    pair = one(parse, PairRows, {"prompt": "hi", "chosen": "yes", "rejected": "no"})
    assert (pair.chosen.prompt, pair.chosen.answer, pair.rejected.answer) == ("hi", "yes", "no")
    assert pair.gap is None
    assert not pair.tie
    pair = one(parse, PairRows, {"prompt": [ASK], "chosen": [SAY], "rejected": "no"})
    assert (pair.chosen.turns, pair.rejected.turns) == ([ASK, SAY], [ASK, SAY_NO])
    record = {"prompt": "hi", "chosen_response": "yes", "rejected_response": "no"}
    assert one(parse, PairRows, record, wrap=True).chosen.turns == [ASK, SAY]
    assert one(parse, PairRows, {**record, "chosen_reward": 2.5, "rejected_reward": 1}).gap == 1.5
    assert one(parse, PairRows, {"prompt": "hi", "chosen": "yes", "rejected": "no", "margin": 2}).gap == 2.0


def test_whole_conversations_are_split(parse):
    record = {"chosen": [ASK, SAY, ASK, SAY], "rejected": [ASK, SAY, ASK, SAY_NO]}
    for more in ({}, {"prompt": "hi"}, {"prompt": [ASK]}):
        pair = one(parse, PairRows, {**record, **more})
        assert pair.chosen.turns == [ASK, SAY, ASK, SAY]
        assert pair.chosen.learn == pair.rejected.learn == [False, False, False, True]
    texts = {"chosen": "Human: hi\n\nAssistant: yes sir", "rejected": "Human: hi\n\nAssistant: yes man"}
    pair = one(parse, PairRows, texts)
    assert pair.chosen.prompt == pair.rejected.prompt == "Human: hi\n\nAssistant: yes"
    assert (pair.chosen.answer, pair.rejected.answer) == (" sir", " man")
    # One begins with all of the other; and no blank to split at.
    pair = one(parse, PairRows, {"chosen": "a word", "rejected": "a words"})
    assert (pair.chosen.answer, pair.rejected.answer) == (" word", " words")
    pair = one(parse, PairRows, {"chosen": "1+1=2", "rejected": "1+1=3"})
    assert (pair.chosen.prompt, pair.chosen.answer) == ("1+1=", "2")


def test_paired_lines(parse):
    pairs = parse(PairRows, [{"text": f"to {word}"} for word in ("win", "lose", "sing", "shout")])
    assert [(p.chosen.prompt, p.chosen.answer, p.rejected.answer) for p in pairs] == [
        ("to", " win", " lose"),
        ("to", " sing", " shout"),
    ]


def test_strength(parse):
    rows = [{"text": f"to {word}", "label": [value]} for word, value in (("a", -2), ("b", -2), ("c", 3), ("d", 3))]
    first, second = parse(PairRows, rows)
    assert (first.chosen.answer, first.rejected.answer, first.gap) == (
        " a",
        " b",
        2,
    )  # negative: the first is preferred
    assert (second.chosen.answer, second.rejected.answer, second.gap) == (" d", " c", 3)
    (tie,) = parse(PairRows, [{"text": "a", "label": [0]}, {"text": "b", "label": [0]}])
    assert tie.tie
    # The same records, told to be plain lines.
    assert parse(PairRows, rows, format="lines")[1].chosen.answer == " c"


def test_unpaired(parse):
    good = one(parse, UnpairedRows, {"prompt": "hi", "response": "yes", "preference": "chosen"})
    assert (good.text.prompt, good.text.answer, good.good) == ("hi", "yes", True)
    assert not one(parse, UnpairedRows, {"prompt": "hi", "response": "no", "preference": "rejected"}).good
    for value in (True, False):
        labelled = one(parse, UnpairedRows, {"prompt": [ASK], "completion": [SAY], "label": value})
        assert (labelled.text.turns, labelled.good) == ([ASK, SAY], value)


def test_ratings(parse):
    rated = one(parse, LabelRows, {"text": "hi yes", "label": [4, -100, 0.5]})
    assert (rated.text.answer, rated.ratings) == ("hi yes", (4.0, -100.0, 0.5))
    steerlm = one(parse, LabelRows, NEMO)
    assert [turn["content"] for turn in steerlm.text.turns] == ["be kind", "hi", "yes"]
    #                          quality  toxicity humor
    assert steerlm.ratings == (4.0, -100.0, 0.0, *[-100.0] * 6)


def test_steps(parse):
    steps = one(parse, StepRows, {"prompt": "hi", "completions": ["one", "three"], "labels": [True, False]})
    assert (steps.text.prompt, steps.text.answer) == ("hi", "one\nthree")
    assert (steps.ends, steps.ratings) == ((3, 9), (1.0, 0.0))


def test_topk(parse):
    teacher = one(parse, TopKRows, TOPK)
    # What is said after a token goes to the token that follows, and what follows the last trained one is left out.
    assert teacher.tokens.tolist() == [5, 6, 7, 8]
    assert teacher.mask.tolist() == [False, False, True, True]
    assert teacher.logits.tolist() == [[0, 0], [9, 1], [2, 1], [4, 3]]
    assert teacher.ids.tolist() == [[0, 0], [1, 2], [7, 3], [8, 5]]
    np.testing.assert_array_equal(teacher.log_normalizer, np.array([0, 9.5, 2.5, 4.5], np.float32))


EXAMPLES: list[tuple[Any, list[Any], type]] = [
    (TextRows, [{"messages": [ASK, SAY]}], Chat),
    (TextRows, [NEMO], Chat),
    (PairRows, [{"prompt": "hi", "chosen": [SAY], "rejected": [SAY_NO]}], Pair),
    (PairRows, [{"text": "a b", "label": [1]}, {"text": "a c", "label": [1]}], Pair),
    (UnpairedRows, [{"prompt": "hi", "completion": "yes", "label": True}], Unpaired),
    (LabelRows, [{"text": "hi", "label": [1, -100]}], Rated),
    (StepRows, [{"prompt": "hi", "completions": ["a", "b"], "labels": [1, 0]}], Steps),
    (TopKRows, [TOPK], Teacher),
]


@pytest.mark.parametrize(("kind", "records", "example"), EXAMPLES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "saved"])
def test_each_kind_of_file(parse, write, tmp_path, kind, records, example, name):
    if name == "saved":
        import datasets

        datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
        parser = Parser(kind, "auto", Reading(False))
        table = parser.open(str(tmp_path / "saved"))
        found = [parser.parse(table[i]) for i in range(len(table))]
    else:
        found = parse(kind, records, name=name)
    plain = parse(kind, records, name="plain.jsonl")
    assert [type(row) for row in found] == [example]
    assert _without_source(found[0]) == _without_source(plain[0])


def _without_source(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {key: _without_source(getattr(value, key)) for key in value.__dataclass_fields__ if key != "source"}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


FAULTS: list[tuple[Any, Any, str]] = [
    (TextRows, {"message": [ASK, SAY]}, r"fits no format: it has the fields \['message'\].*'messages': messages"),
    (TextRows, {"prompt": "a", "completions": "b"}, r'for \'completion\' it lacks "completion" \(did you mean \'compl'),
    (TextRows, {"messages": "hi"}, r'field "messages": expected a list of turns, found a string'),
    (TextRows, {"messages": []}, r'field "messages": holds no turn'),
    (TextRows, {"messages": [ASK]}, r'field "messages": no turn of the assistant\'s to learn \(roles: user\)'),
    (TextRows, {"messages": [ASK, {"role": "assistant"}]}, r'field "messages", turn 2: expected a string or a list'),
    (TextRows, {"prompt": 3, "completion": "b"}, r'field "prompt": expected a string or a list of turns, found a num'),
    (TextRows, {"prompt": "a", "completion": ""}, r'field "completion" is empty'),
    (TextRows, {"input": "a", "output": {"a": 1}}, r'field "output": expected a string or a list of turns, found an o'),
    (TextRows, {"prompt": [ASK, SAY], "completion": [SAY]}, r'field "prompt": ends with a turn of the assistant'),
    (TextRows, {"text": ["a"]}, r'field "text": expected a string, found a list'),
    (
        TextRows,
        {"conversations": [{"from": "human"}]},
        r'field "conversations", turn 1: expected a string under "value"',
    ),
    (
        TextRows,
        {"conversations": [{"from": "Ann", "value": "a"}]},
        r"turn 1: the speaker 'Ann' under \"from\" tells no",
    ),
    (TextRows, {"conversations": [{"from": "human", "value": "a"}]}, r'field "conversations": no turn to learn'),
    (TextRows, {**NEMO, "mask": "Usr"}, r"field \"mask\": no turn is from 'Usr'; speakers: \['Assistant', 'User'\]"),
    (TextRows, {**NEMO, "mask": 1}, r'field "mask": expected the name of a speaker, found a number'),
    (TextRows, {**NEMO, "type": "TEXT_TO_VALUE"}, r"field \"type\": 'TEXT_TO_VALUE' is not read"),
    (TextRows, {**NEMO, "system": 1}, r'field "system": expected a string'),
    (PairRows, {"prompt": "a", "chosen": "b"}, r"for 'preference' it lacks \"rejected\""),
    (PairRows, {"prompt": "a", "chosen": "b", "rejected": "b"}, r'field "rejected": equal to "chosen"'),
    (
        PairRows,
        {"prompt": "a", "chosen": "b", "rejected": 1},
        r'field "rejected": expected a string or a list of turns',
    ),
    (PairRows, {"chosen": [ASK, SAY], "rejected": [ASK]}, r'field "rejected": nothing in it differs from "chosen"'),
    (PairRows, {"chosen": [ASK, SAY], "rejected": "b"}, r'field "rejected": expected a list of turns, found a string'),
    (PairRows, {"chosen": "a b", "rejected": "a b"}, r"the two texts are equal"),
    (
        PairRows,
        {"prompt": "a", "chosen_response": "b", "rejected_response": "c", "chosen_reward": 1},
        r'field "chosen_reward": there, but "rejected_reward" is not',
    ),
    (
        PairRows,
        {"prompt": "a", "chosen_response": "b", "rejected_response": "c", "chosen_reward": 1, "rejected_reward": 2},
        r'field "chosen_reward": says that the rejected answer is better by 1; exchange',
    ),
    (PairRows, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, r'field "margin": expected a number'),
    (UnpairedRows, {"prompt": "a", "response": "b", "preference": "good"}, r'field "preference": expected "chosen" or'),
    (
        UnpairedRows,
        {"prompt": "a", "completion": "b", "label": 1},
        r'field "label": expected true or false, found a num',
    ),
    (UnpairedRows, {"prompt": "a", "completion": "b"}, r"for 'label' it lacks \"label\""),
    (LabelRows, {"text": "a", "label": 4}, r'field "label": expected a list of numbers, found a number'),
    (LabelRows, {"text": "a", "label": [1, "2"]}, r'field "label", number 2: expected a finite number, found a string'),
    (LabelRows, {"text": "a", "label": [-100, -100]}, r'field "label": every attribute is -100'),
    (LabelRows, {"text": "a"}, r"for 'regression' it lacks \"label\""),
    (LabelRows, {**NEMO, "conversations": NEMO["conversations"][:1]}, r'field "conversations": no turn has a "label"'),
    (StepRows, {"prompt": "a", "completions": "b", "labels": [1]}, r'field "completions": expected a list of steps'),
    (
        StepRows,
        {"prompt": "a", "completions": ["b", 1], "labels": [1]},
        r'field "completions", step 2: expected a text',
    ),
    (StepRows, {"prompt": "a", "completions": ["b"], "labels": [1, 0]}, r'field "labels": 2 labels for 1 steps'),
    (
        StepRows,
        {"prompt": "a", "completions": ["b"], "labels": [4]},
        r'field "labels": from 0 \(wrong\) to 1 \(right\)',
    ),
    (TopKRows, {**TOPK, "labels": [6, 9, 8, 0]}, r'field "labels": entry 2 is 9, and the token that follows is 7'),
    (TopKRows, {**TOPK, "loss_mask": [0, 1]}, r'field "loss_mask": 2 entries, and "tokens" has 4'),
    (TopKRows, {**TOPK, "loss_mask": [0, 0, 0, 0]}, r'field "loss_mask": no token is trained'),
    (TopKRows, {**TOPK, "topk_logits": [1, 2, 3, 4]}, r'field "topk_logits": expected a list of lists of numbers'),
    (TopKRows, {**TOPK, "topk_token_ids": [[1, 2], [7, 7], [8, 5], [0, 0]]}, r"entry 2: a token is there twice"),
    (TopKRows, {**TOPK, "tokens": [5, 6, "x", 0]}, r'field "tokens": expected a list of numbers'),
    (TopKRows, {**TOPK, "log_sum_exp_logits": [9.5, 0, 4.5, 1]}, r'field "log_sum_exp_logits", entry 2: below one of'),
    (TopKRows, {key: TOPK[key] for key in TOPK if key != "topk_logits"}, r"for 'topk' it lacks \"topk_logits\""),
]


@pytest.mark.parametrize(("kind", "record", "message"), FAULTS)
def test_records_that_do_not_fit(parse, kind, record, message):
    good = next(records for k, records, _ in EXAMPLES if k is kind)
    if len(good) > 1:
        good = good[:0]
    with pytest.raises(DataError, match=rf"rows\.jsonl:{len(good) + 1}: .*{message}"):
        parse(kind, [*good, record])


def format_of(kind: Any, record: Any) -> str:
    """The format that a record is in, by its fields; empty where they are those of none."""
    return next((format.name for format in FORMATS[kind] if set(format.fields) <= record.keys()), "")


def test_every_format_has_a_malformed_twin() -> None:
    refused = {(kind, format_of(kind, record)) for kind, record, _ in FAULTS}
    refused |= {(PairRows, format_of(PairRows, records[0])) for records, _ in LINE_FAULTS}
    assert refused >= {(kind, format.name) for kind, formats in FORMATS.items() for format in formats}


LINE_FAULTS: list[tuple[list[Any], str]] = [
    ([{"text": "a"}] * 3, r":3: the last of 3 lines has no partner"),
    ([{"text": "a"}, {"text": "a"}], r":1: the two texts are equal"),
    ([{"text": "a"}, {"text": 1}], r':2: field "text": expected a string, found a number'),
    ([{"text": "a"}, {"txt": "b"}], r":2: fits no format: .*for 'lines' it lacks \"text\""),
    ([{"text": "a"}, {"text": "b", "label": [1]}], r":2: two lines make up a pair in this file, and these differ"),
    ([{"text": "a", "label": [1]}, {"text": "b", "label": [2]}], r':2: field "label": 2, and .*:1 has 1; both rows'),
    ([{"text": "a", "label": [4]}, {"text": "b", "label": [4]}], r':1: field "label": a strength is a whole number'),
    ([{"text": "a", "label": 1}, {"text": "b", "label": 1}], r':1: field "label": expected a list of numbers'),
]


@pytest.mark.parametrize(("records", "message"), LINE_FAULTS)
def test_lines_that_make_no_pair(parse, records, message):
    with pytest.raises(DataError, match=r"rows\.jsonl" + message):
        parse(PairRows, records)


def test_a_line_of_a_pair_among_whole_records(parse):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: one line of a pair .*files of their own"):
        parse(PairRows, [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"text": "d"}])


def test_each_file_of_a_pattern_has_whole_pairs(write, tmp_path):
    for name in ("p1.jsonl", "p2.jsonl"):
        write(name, [{"text": "a"}, {"text": "b"}, {"text": "c"}])
    with pytest.raises(DataError, match=r"p1\.jsonl:3: the last of 3 lines has no partner"):
        Parser(PairRows, "auto", Reading(False)).open(str(tmp_path / "p*.jsonl"))


def test_the_format_can_be_named(parse):
    record = {"messages": [ASK, SAY], "prompt": "a", "completion": "b"}
    assert isinstance(one(parse, TextRows, record), Chat)
    assert one(parse, TextRows, record, format="completion").answer == "b"
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: fits no format: .*'output' it lacks|Formats of TextRows: 'output'"
    ):
        parse(TextRows, [record], format="output")
    with pytest.raises(InputError, match=r"data\.format = 'linse'.*PairRows.*did you mean 'lines'"):
        parse(PairRows, [record], format="linse")


def test_every_kind_has_names_of_its_own():
    for formats in FORMATS.values():
        assert len({format.name for format in formats}) == len(formats)


def test_a_column_of_another_type(parse, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    day = datetime.date(2025, 1, 1)
    pq.write_table(pa.table({"prompt": ["a"], "completion": [day]}), tmp_path / "day.parquet")
    parser = Parser(TextRows, "auto", Reading(False))
    with pytest.raises(DataError, match=r'day\.parquet:row 1: field "completion": .*found date'):
        parser.parse(parser.open(str(tmp_path / "day.parquet"))[0])
