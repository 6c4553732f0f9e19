"""Readers of every format, and what they say about files that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from yatt_jax.data.config import DataError
from yatt_jax.data.paths import expand
from yatt_jax.data.records import Table, open_table

RECORDS = [{"prompt": f"question {i}", "answer": i, "parts": [{"a": i}, {"a": -i}]} for i in range(7)]


def fields(table: Table) -> list[dict]:
    return [table[i].fields for i in range(len(table))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet"])
def test_every_format_gives_the_same_records(write, name):
    table = open_table(write(name, RECORDS))
    assert fields(table) == RECORDS
    assert table[5].fields == RECORDS[5]  # and again, in any order
    assert table[2].fields == RECORDS[2]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.jsonl", "a.jsonl:3"),
        ("a.jsonl.gz", "a.jsonl.gz:3"),
        ("a.json", "a.json:1"),
        ("a.parquet", "a.parquet:row 3"),
    ],
)
def test_records_know_where_they_come_from(write, name, source):
    assert open_table(write(name, RECORDS))[2].source.endswith(source)


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf\n{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}\n\n{"prompt": "c"}')
    table = open_table(str(file))
    assert fields(table) == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    assert [table[i].source.rsplit(":", 1)[1] for i in range(3)] == ["2", "5", "7"]
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert fields(open_table(str(file))) == [{"prompt": "a"}]


def test_a_json_document_counts_lines(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"name": "set [", "data": RECORDS}, indent=1))
    table = open_table(str(file))
    line = int(table[1].source.rsplit(":", 1)[1])
    assert file.read_text().splitlines()[line - 1 : line + 1] == ["  {", '   "prompt": "question 1",']
    assert fields(table) == RECORDS


def test_json_lines_named_json_are_read(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert fields(open_table(str(file))) == [{"text": "a"}, {"text": "b"}]
    assert open_table(str(file))[1].source.endswith("a.json:2")


def test_patterns_join_files_in_order(write, tmp_path: Path):
    write("part-2.jsonl", RECORDS[3:])
    write("part-1.jsonl", RECORDS[:3])
    write("other.jsonl", [{"prompt": "no"}])
    table = open_table(str(tmp_path / "part-*.jsonl"))
    assert fields(table) == RECORDS
    assert table[3].source.endswith("part-2.jsonl:1")


def test_saved_datasets_folder(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([*RECORDS, {"prompt": "last", "answer": None, "parts": []}])
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    table = open_table(str(tmp_path / "one"))
    assert fields(table) == [*RECORDS, {"prompt": "last", "parts": []}]  # null says: not there
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    assert len(open_table(str(tmp_path / "two" / "train"))) == 8
    with pytest.raises(DataError, match=r"several splits; name one of \[.*two/test.*two/train"):
        expand(str(tmp_path / "two"))
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"not there.*data-00001-of-00003\.arrow"):
        open_table(str(tmp_path / "one"))


def test_arrow_files_in_both_layouts(tmp_path: Path):
    import pyarrow as pa

    table = pa.Table.from_pylist(RECORDS)
    for name, writer in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with writer(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=3)
        assert fields(open_table(str(path))) == RECORDS


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_empty_files(tmp_path: Path, name):
    file = tmp_path / name
    file.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    with pytest.raises(DataError, match=r"a\.\S+: (holds no records|empty file|cannot be read as Parquet)"):
        open_table(str(file))


def test_an_empty_list(write):
    with pytest.raises(DataError, match="holds no records"):
        open_table(write("a.json", []))


def test_a_malformed_line(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b",}\n')
    table = open_table(str(file))
    assert table[0].fields == {"prompt": "a"}
    with pytest.raises(DataError, match=r"a\.jsonl:2, column 16: malformed JSON: .*each line holds one"):
        _ = table[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a"},\n {"prompt": }]', r"a\.json:2, column 13: malformed JSON"),
        ('[{"prompt": "a"}', r"a\.json:1, column 17: malformed JSON"),
        ('{\n"train": []}', r'expected a list of records, or an object with the list under "data"'),
        ("12", r"a\.json:1, column 1: malformed JSON: Expecting '\[' or '{'"),
    ],
)
def test_malformed_documents(tmp_path: Path, text, message):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        open_table(str(file))


@pytest.mark.parametrize(
    ("line", "found"), [("[1]", "a list"), ('"a"', "a string"), ("3", "a number"), ("null", "null")]
)
def test_lines_that_are_no_objects(tmp_path: Path, line, found):
    file = tmp_path / "a.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:1: expected an object with named fields, found {found}"):
        _ = open_table(str(file))[0]


def test_bytes_that_are_not_utf8(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8 at byte 13 of the line"):
        _ = open_table(str(file))[1]


def test_damaged_archives(write, tmp_path: Path):
    whole = Path(write("a.jsonl.gz", RECORDS)).read_bytes()
    for name, data in (
        ("cut", whole[:-20]),
        ("text", b'{"prompt": "a"}\n'),
        ("flipped", whole[:20] + b"xxxx" + whole[24:]),
    ):
        file = tmp_path / f"{name}.jsonl.gz"
        file.write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}\.jsonl\.gz: damaged, or not gzip"):
            open_table(str(file))
    parquet = tmp_path / "cut.parquet"
    parquet.write_bytes(Path(write("b.parquet", RECORDS)).read_bytes()[:-30])
    with pytest.raises(DataError, match=r"cut\.parquet: cannot be read as Parquet"):
        open_table(str(parquet))


def test_missing_files_name_the_nearest(write, tmp_path: Path):
    write("prompts_train.jsonl", RECORDS)
    with pytest.raises(DataError, match=r"no such file or folder \(did you mean '.*prompts_train\.jsonl'"):
        expand(str(tmp_path / "prompt_train.jsonl"))
    with pytest.raises(DataError, match=r"the folder '.*/nowhere' does not exist"):
        expand(str(tmp_path / "nowhere" / "a.jsonl"))
    with pytest.raises(DataError, match=r"no file matches this pattern; data files in .*: prompts_train\.jsonl"):
        expand(str(tmp_path / "zzz-*.jsonl"))
    with pytest.raises(DataError, match=r"a folder, but no saved data set .*write '.*\*\.jsonl'"):
        expand(str(tmp_path))


def test_unknown_extension(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt\n")
    with pytest.raises(DataError, match=r"a\.csv: cannot tell the format from the name; names end in \.jsonl"):
        expand(str(tmp_path / "a.csv"))


def test_large_files_are_not_held_in_memory(tmp_path: Path):
    import tracemalloc

    file = tmp_path / "a.jsonl"
    with open(file, "w") as out:
        for i in range(3000):
            out.write(json.dumps({"prompt": f"{i} " + "x" * 2000}) + "\n")
    tracemalloc.start()
    table = open_table(str(file))
    assert table[2999].fields["prompt"].startswith("2999 ")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000 < 6_000_000 < file.stat().st_size
