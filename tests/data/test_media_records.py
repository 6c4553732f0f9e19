"""Records with media, from files to prompts and documents: every step a record goes through."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.data.media_files import PLACES, picture, processor_of, saved, sound, tokenizer_with_places, tone
from yatt_jax.data.config import DataConfig, DataError, SourceConfig
from yatt_jax.data.documents import Encoder
from yatt_jax.data.media.processor import MediaProcessor
from yatt_jax.data.offline import OfflineSource
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.prompts import PromptSource
from yatt_jax.data.reader import Outcome, PromptReader
from yatt_jax.data.records import Record, open_table
from yatt_jax.types import PairRows, Prompt, TextRows, UnpairedRows

IMAGE = saved(picture(16, 16))  # 4 x 4 patches, 4 tokens
SOUND = sound(tone(0.1))  # 10 frames, 2 tokens
KWARGS = {family: {"places": places} for family, places in PLACES.items()}


def image(value: Any = IMAGE) -> dict:
    return {"type": "image", "image": value}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def user(*parts: dict | str) -> dict:
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def assistant(content: Any) -> dict:
    return {"role": "assistant", "content": content}


def read(fields: dict, family: str = "qwen2_5_vl", media: MediaProcessor | None = None, **config: Any) -> Outcome:
    data = DataConfig(template_kwargs=KWARGS[family], **config)
    reader = PromptReader(data, tokenizer_with_places(), media or processor_of(family))
    return reader.read([(3, Record(fields, "p.jsonl:4"))])[0]


def prompt(fields: dict, family: str = "qwen2_5_vl", **config: Any) -> Prompt:
    outcome = read(fields, family, **config)
    assert outcome.prompt is not None, outcome.message
    return outcome.prompt


def words(tokens: Any) -> str:
    return "".join(tokenizer_with_places().convert_ids_to_tokens(list(tokens)))


def test_a_prompt_with_an_image():
    got = prompt({"prompt": [user("see", image(), "what")], "answer": 3})
    assert words(got.tokens) == ("[u]see<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>what<end>[a]")
    assert (got.columns, got.source, got.index) == ({"answer": 3}, "p.jsonl:4", 3)
    (item,) = got.media
    assert (item.kind, item.tokens) == ("image", 4)
    assert item == processor_of("qwen2_5_vl").item(got.messages[0]["content"][1]["image"])
    # A content of text parts alone is a string, as before.
    assert prompt({"prompt": [user("a", "b")]}).messages == [{"role": "user", "content": "ab"}]


def test_all_kinds_in_one_prompt():
    parts = [image(), "a", {"type": "audio", "audio": SOUND}, {"type": "video", "video": [IMAGE] * 4}]
    got = prompt({"messages": [{"role": "system", "content": "s"}, user(*parts)]}, "qwen2_5_omni")
    assert words(got.tokens) == (
        "[s]s<end>[u]" + 4 * "<|IMAGE|>" + "a" + 2 * "<|AUDIO|>" + 8 * "<|VIDEO|>" + "<end>[a]"
    )
    assert [item.kind for item in got.media] == ["image", "audio", "video"]


def test_gemma3():
    got = prompt({"prompt": [user("see ", image(), image())]}, "gemma3")
    one = "\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\n"
    assert words(got.tokens) == f"[u]see {one}{one}<end>[a]"


def test_every_file_format_holds_media(write, tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(IMAGE)
    by_path, encoded = image("media/a.png"), image(base64.b64encode(saved(picture(16, 16), "JPEG")).decode())
    wanted = prompt({"prompt": [user("see", image())]}).media[0]
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.json.gz", "e.parquet"):
        table = open_table(write(name, [{"prompt": [user("see", by_path)]}, {"prompt": [user("see", encoded)]}]))
        reader = PromptReader(
            DataConfig(template_kwargs=KWARGS["qwen2_5_vl"]), tokenizer_with_places(), processor_of("qwen2_5_vl")
        )
        first, second = reader.read([(i, table[i]) for i in range(2)])
        assert first.prompt is not None, first.message
        assert first.prompt.media == (wanted,)
        assert second.prompt is not None, second.message
        assert second.prompt.media[0].grid == (1, 4, 4)


def test_bytes_in_parquet_and_saved_data_sets(tmp_path):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": [{"role": "user", "content": [{"type": "image", "image": {"bytes": IMAGE, "path": None}}]}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "x.png").write_bytes(IMAGE)
    datasets.Dataset.from_list([{"prompt": [user(image("x.png"))]}]).save_to_disk(str(tmp_path / "set"))
    (tmp_path / "set" / "x.png").write_bytes(IMAGE)
    for path in ("a.parquet", "set"):
        record = open_table(str(tmp_path / path))[0]
        reader = PromptReader(
            DataConfig(template_kwargs=KWARGS["qwen2_5_vl"]), tokenizer_with_places(), processor_of("qwen2_5_vl")
        )
        (outcome,) = reader.read([(0, record)])
        assert outcome.prompt is not None, outcome.message
        assert outcome.prompt.media[0].tokens == 4


def test_a_broken_file_is_an_error_or_a_counted_skip(write, tmp_path):
    (tmp_path / "cut.png").write_bytes(IMAGE[:-200])
    (tmp_path / "good.png").write_bytes(IMAGE)
    names = ["good.png"] * 9 + ["cut.png"] * 3
    path = write("a.jsonl", [{"prompt": [user(f"see {i}", image(name))]} for i, name in enumerate(names)])

    def source(**config: Any) -> PromptSource:
        data = DataConfig(train=(SourceConfig(path),), template_kwargs=KWARGS["qwen2_5_vl"], **config)
        return PromptSource(data, tokenizer_with_places(), prompts_per_step=4, media=processor_of("qwen2_5_vl"))

    raising = source(shuffle=False)
    for _ in range(2):
        raising.draw()
    message = rf"{path}:10: .*part 2, image \(cut.png\): the image is cut off.*data.on_error='skip'"
    with pytest.raises(DataError, match=message):
        raising.draw()
    skipping = source(on_error="skip")
    drawn = [p for _ in range(6) for p in skipping.draw().prompts]
    assert len(drawn) == 24
    assert {p.index for p in drawn} <= set(range(9))
    assert skipping.skipped["malformed"] >= 3


def test_files_that_are_not_there_stop_the_run_before_it_starts(write, tmp_path):
    (tmp_path / "a.png").write_bytes(IMAGE)
    path = write("a.jsonl", [{"prompt": [user(image("a.png"))]}, {"prompt": [user(image("b.png"))]}])
    data = DataConfig(train=(SourceConfig(path),), template_kwargs=KWARGS["qwen2_5_vl"])
    with pytest.raises(DataError, match=rf'{path}:2: field "prompt", turn 1, part 1, image \(b.png\): no such file'):
        PromptSource(data, tokenizer_with_places(), prompts_per_step=1, media=processor_of("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("parts", "family", "message"),
    [
        (["a", image()], "", r"part 2, image: found image, and the model reads text only"),
        ([image()], "qwen2_audio", "found image, and the model reads text and audio"),
        ([image()] * 17, "qwen2_5_vl", r"part 1, image: 17 media in one text, and data.media.max_items is 16"),
        ([image("../x.png")], "qwen2_5_vl", r"image \(../x.png\): leads out of"),
        ([image("http://127.0.0.1/x.png")], "qwen2_5_vl", "an address, and none is fetched"),
        ([image(), "<|image_pad|>"], "qwen2_5_vl", "the text has placeholders for 2 image, the record has 1 image"),
        (["<|image_pad|>"], "qwen2_5_vl", "placeholders for 1 image, the record has none"),
        ([image(), "<start_of_image>"], "gemma3", "placeholders for 2 image"),
        ([image(saved(picture(900, 4)))], "qwen2_5_vl", "absolute aspect ratio must be smaller than 200"),
    ],
)
def test_media_that_cannot_be_used(parts, family, message):
    data = DataConfig(template_kwargs=KWARGS.get(family, {}))
    reader = PromptReader(data, tokenizer_with_places(), processor_of(family) if family else None)
    (outcome,) = reader.read([(0, Record({"prompt": [user(*parts)]}, "p.jsonl:4"))])
    assert outcome.fault == "malformed"
    assert outcome.message.startswith("p.jsonl:4")
    import re

    assert re.search(message, outcome.message), outcome.message


def test_a_template_that_writes_no_placeholder():
    reader = PromptReader(
        DataConfig(template_kwargs={"places": {"image": ""}}), tokenizer_with_places(), processor_of("qwen2_5_vl")
    )
    (outcome,) = reader.read([(0, Record({"prompt": [user(image())]}, "p.jsonl:4"))])
    assert "placeholders for none, the record has 1 image; does the chat template write one" in outcome.message


def test_long_prompts_are_cut_around_their_media():
    turns = [user("first ", image()), assistant("ok"), user("second ", image(), " abcdefghij")]
    whole = prompt({"prompt": turns})
    assert len(whole.media) == 2
    last = words(prompt({"prompt": turns[2:]}).tokens)
    # The first turn goes, with its image.
    got = read({"prompt": turns}, max_prompt_tokens=len(whole.tokens) - 1, overlong="cut")
    assert (got.fault, words(got.prompt.tokens)) == ("cut", last)  # type: ignore[union-attr]
    assert len(got.prompt.media) == 1  # type: ignore[union-attr]
    # Then text of the last turn from its beginning, and never the image.
    count = len(prompt({"prompt": turns[2:]}).tokens)
    for less, left in ((3, "ond "), (7, ""), (9, "")):
        cut = read({"prompt": turns}, max_prompt_tokens=count - less, overlong="cut").prompt
        assert cut is not None
        after = " abcdefghij"[max(less - 7, 0) :]
        middle = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
        assert words(cut.tokens) == f"[u]{left}{middle}{after}<end>[a]"
    # Nothing of the text is left to cut: an error that names the limit.
    got = read({"prompt": [user(image(), "a")]}, max_prompt_tokens=8, overlong="cut")
    assert got.prompt is None
    assert "4 of them for images, audio and video, and data.max_prompt_tokens is 8; it cannot be cut" in got.message


def test_equal_questions_about_different_images_are_different_prompts(write, tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(saved(picture(16, 16, i % 5)))
    path = write("a.jsonl", [{"prompt": [user("what", image(f"{i}.png"))]} for i in range(6)])
    data = DataConfig(train=(SourceConfig(path),), holdout=1, template_kwargs=KWARGS["qwen2_5_vl"])
    source = PromptSource(data, tokenizer_with_places(), prompts_per_step=5, media=processor_of("qwen2_5_vl"))
    (held,) = source.evaluation()
    assert held.media[0].kept is None
    drawn = [p for _ in range(4) for p in source.draw().prompts]
    assert held.identity not in {p.identity for p in drawn}
    assert len({p.identity for p in drawn}) == 4
    assert len({p.text for p in drawn}) == 1


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_process_decodes_its_own_rows_alone(processes, write, tmp_path, monkeypatch):
    count = 8
    for i in range(count):
        (tmp_path / f"{i}.png").write_bytes(saved(picture(16, 16, i)))
    path = write("a.jsonl", [{"prompt": [user(f"{i}", image(f"{i}.png"))]} for i in range(count)])
    data = DataConfig(train=(SourceConfig(path),), shuffle=False, check_rows=0, template_kwargs=KWARGS["qwen2_5_vl"])
    read_by: list[set[str]] = []
    held: list[int] = []
    for process in range(processes):
        processor = processor_of("qwen2_5_vl")
        seen: set[str] = set()
        make = processor.item
        monkeypatch.setattr(processor, "item", lambda s, make=make, seen=seen: (seen.add(s.name), make(s))[1])
        source = PromptSource(
            data,
            tokenizer_with_places(),
            prompts_per_step=count,
            process_index=process,
            process_count=processes,
            media=processor,
        )
        drawn = source.draw().prompts
        read_by.append(seen)
        held.append(sum(item.values.nbytes for p in drawn for item in p.media))
    assert [len(seen) for seen in read_by] == [count // processes] * processes
    assert set.union(*read_by) == {f"{i}.png" for i in range(count)}
    assert held == [count * 16 * 96 * 4 // processes] * processes


def documents(fields: dict, kind: Any = TextRows, family: str = "qwen2_5_vl", **config: Any) -> Any:
    data = OfflineConfig(template_kwargs=KWARGS[family], **config)
    encoder = Encoder(data, tokenizer_with_places(), kind, media=processor_of(family))
    (outcome,) = encoder.read([(0, Record(fields, "f:1"))])
    return outcome


def test_fine_tuning_rows():
    turns = [user("see", image(), "a"), assistant("one"), user(image(), "b"), assistant("two")]
    (document,) = documents({"messages": turns}).row.documents
    pads = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
    assert words(document.tokens) == f"[u]see{pads}a<end>[a]one<end>[u]{pads}b<end>[a]two<end>"
    assert words(document.tokens[document.mask]) == "one<end>two<end>"
    assert [words(document.tokens[p.first : p.end]) for p in document.places] == [4 * "<|image_pad|>"] * 2
    assert len(document.media) == 2
    # All of a text but its media is learned if that is wanted.
    (document,) = documents({"messages": turns}, learn="all").row.documents
    assert words(document.tokens[document.mask]) == words(document.tokens[1:]).replace("<|image_pad|>", "")
    # Gemma's placeholders have text around them, and the learned parts move along.
    (document,) = documents({"messages": turns}, family="gemma3").row.documents
    assert words(document.tokens[document.mask]) == "one<end>two<end>"


def test_answers_hold_no_media():
    outcome = documents({"messages": [user("draw"), assistant([text("here"), image()])]})
    assert outcome.row is None
    assert outcome.message.startswith('f:1: field "messages", turn 2, part 2, image: an image in an answer')


def test_rows_are_cut_before_media_and_not_through_them():
    turns = [user("a"), assistant("b"), user("c", image()), assistant("d")]
    whole = documents({"messages": turns}).row.documents[0]
    first, end = whole.places[0].first, whole.places[0].end
    for limit in range(6, len(whole)):
        (document,) = documents({"messages": turns}, max_tokens=limit, overlong="cut").row.documents
        inside = first < limit < end
        assert len(document) == (first if inside else limit)
        assert len(document.media) == len(document.places) == int(limit >= end)


def test_pairs_read_each_medium_once(monkeypatch):
    processor = processor_of("qwen2_5_vl")
    calls: list[str] = []
    make = processor.item
    monkeypatch.setattr(processor, "item", lambda s: (calls.append(s.name), make(s))[1])
    encoder = Encoder(
        OfflineConfig(template_kwargs=KWARGS["qwen2_5_vl"]), tokenizer_with_places(), PairRows, media=processor
    )
    whole = {"chosen": [user("a", image()), assistant("b")], "rejected": [user("a", image()), assistant("c")]}
    split = {"prompt": [user("a", image())], "chosen": "b", "rejected": [assistant("c")]}
    for fields in (whole, split):
        calls.clear()
        (outcome,) = encoder.read([(0, Record(fields, "f:1"))])
        assert outcome.row is not None, outcome.message
        chosen, rejected = outcome.row.documents
        assert len(calls) == 1
        assert chosen.media[0] is rejected.media[0]
        assert (words(chosen.tokens[chosen.mask]), words(rejected.tokens[rejected.mask])) == ("b<end>", "c<end>")


def test_unpaired_rows_keep_their_own_media(write: Callable[..., str], tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(saved(picture(16, 16 + 8 * i, i)))
    rows = [{"prompt": [user(f"q{i}", image(f"{i}.png"))], "completion": f"a{i}", "label": True} for i in range(4)]
    config = OfflineConfig(train=(SourceConfig(write("a.jsonl", rows)),), batch=4, template_kwargs=KWARGS["qwen2_5_vl"])
    source = OfflineSource(config, tokenizer_with_places(), UnpairedRows, media=processor_of("qwen2_5_vl"))
    for row in source.draw().rows:
        own, other = row[0].documents
        assert own.media == other.media
        assert own.places == other.places
        np.testing.assert_array_equal(own.prompt, other.prompt)
        assert words(own.tokens[own.mask]) != words(other.tokens[other.mask])


def test_media_of_the_arrays_of_a_step(write: Callable[..., str], tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(saved(picture(16, 16 + 8 * i, i)))
    processor = processor_of("qwen2_5_vl")

    def drawn(kind: Any, rows: list[dict], **config: Any) -> Any:
        data = OfflineConfig(
            train=(SourceConfig(write("a.jsonl", rows)),),
            batch=4,
            shuffle=False,
            template_kwargs=KWARGS["qwen2_5_vl"],
            **config,
        )
        return OfflineSource(data, tokenizer_with_places(), kind, media=processor).draw()

    asked = [user(image("0.png"), "a", image("1.png")), user("b"), user(image("2.png"))]
    sizes = {0: 4, 1: 6, 2: 8}
    found = drawn(TextRows, [{"prompt": [turn], "completion": "c"} for turn in asked])
    assert found.shape[0] == 4
    media = found.media()
    assert [[item.tokens for item in row] for row in media] == [[sizes[0], sizes[1]], [], [sizes[2]], []]
    assert len(found.media(6)) == 6
    arrays = found.collate()
    pad = processor.places["image"]
    for tokens, row in zip(np.asarray(arrays.inputs.tokens), media, strict=True):
        assert int((tokens == pad).sum()) == sum(item.tokens for item in row)
    # Packed rows have the media of all their documents, in order.
    (packed,) = drawn(TextRows, [{"prompt": [turn], "completion": "c"} for turn in asked], pack=1024).media()
    assert [item.tokens for item in packed] == [4, 6, 8]
    # Pairs have them twice: one object, so that a tower runs once.
    found = drawn(PairRows, [{"prompt": [turn], "chosen": "c", "rejected": "d"} for turn in asked])
    media = found.media()
    assert [len(row) for row in media] == [2, 2, 0, 0, 1, 1, 0, 0]
    assert media[0][0] is media[1][0]
    tokens = np.asarray(found.collate().inputs.tokens).reshape(8, -1)
    assert [int((row == pad).sum()) for row in tokens] == [sum(item.tokens for item in row) for row in media]
