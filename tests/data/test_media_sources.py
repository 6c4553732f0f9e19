"""Where media come from: every form in records, and which files, addresses and sizes are refused."""

from __future__ import annotations

import base64
import http.server
import os
import threading
import urllib.parse
from pathlib import Path

import pytest

from tests.data.media_files import WHERE, picture, saved, sound, tone
from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.fetch import fetch
from yatt_jax.data.media.sources import Source, parse_media

PNG = saved(picture())
TEXT = base64.b64encode(PNG).decode()


def read(part: dict, folder: Path, **limits) -> bytes:
    return fetch(parse_media(part, str(folder), WHERE), MediaConfig(**limits))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "sub/../a.png", "image": None},
        {"type": "image", "image": {"path": "a.png", "bytes": None}},
        {"type": "image", "image": PNG},
        {"type": "image", "image": {"bytes": PNG, "path": "name.png"}},
        {"type": "image", "bytes": bytearray(PNG)},
        {"type": "image", "image": TEXT},
        {"type": "image", "base64": TEXT},
        {"type": "image", "image": TEXT[:50] + "\n" + TEXT[50:]},
        {"type": "image", "image": f"data:image/png;base64,{TEXT}"},
        {"type": "image", "image": f"data:image/png;base64,{urllib.parse.quote(TEXT)}"},
        {"type": "image", "image": f"data:image/png,{urllib.parse.quote_from_bytes(PNG)}"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}},
        {"type": "input_image", "image_url": None, "input_image": "a.png"},
    ],
)
def test_every_form_gives_the_same_bytes(part, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "sub").mkdir()
    assert read(part, tmp_path) == PNG


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "WAV", "FLAC"])
def test_base64_is_told_from_paths_by_its_beginning(form, tmp_path):
    content = saved(picture(), form) if form in ("PNG", "JPEG", "WEBP") else sound(tone(0.1), form=form)
    kind = "image" if form in ("PNG", "JPEG", "WEBP") else "audio"
    text = base64.b64encode(content).decode()
    assert read({"type": kind, kind: text}, tmp_path) == content
    # A name that begins so is still a name.
    for name in ("iVBORw0KGgo", "UklGR/a.wav", text[:70] + ".png"):
        assert parse_media({"type": kind, kind: name}, "", "").form == "path"


def test_audio_and_video_parts():
    audio = parse_media({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, "f", "w")
    assert (audio.kind, audio.form, audio.folder) == ("audio", "base64", "f")
    video = parse_media({"type": "video", "video": ["a.png", {"bytes": PNG}], "fps": 4}, "f", "w")
    assert (video.kind, video.form, video.fps) == ("video", "frames", 4.0)
    assert isinstance(video.value, tuple)
    assert [frame.form for frame in video.value if isinstance(frame, Source)] == ["path", "bytes"]
    assert video.value[1].where == "w, video, frame 2"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image"},
            r"expected a path, bytes, base64, a data URL or an address under \"image\", found the fields",
        ),
        ({"type": "image", "image": 3}, ", image: expected a path, bytes, .* found a number"),
        ({"type": "image", "image": "  "}, "empty; expected a path"),
        ({"type": "image", "image": {"file": "a"}}, r"expected one of \['bytes', .*found the fields \['file'\]"),
        ({"type": "image", "image": ["a"]}, "found a list"),
        ({"type": "video", "video": []}, "a video without frames"),
        ({"type": "video", "video": ["a"], "fps": 0}, 'expected a positive number under "fps", found 0'),
        ({"type": "video", "video": ["a"], "fps": True}, "expected a positive number"),
    ],
)
def test_parts_that_do_not_fit(part, message):
    with pytest.raises(DataError, match=rf'p\.jsonl:4: field "prompt", turn 1, part 1.*{message}'):
        parse_media(part, "", WHERE)


def test_files_stay_below_the_folder(tmp_path):
    data, outside = tmp_path / "data", tmp_path / "outside.png"
    data.mkdir()
    outside.write_bytes(PNG)
    (data / "link.png").symlink_to(outside)
    for name in ("../outside.png", str(outside), "link.png", "../data/../outside.png"):
        part = {"type": "image", "image": name}
        with pytest.raises(DataError, match=r"part 1, image \(.*\): leads out of .*data.media.allow_outside"):
            read(part, data)
        assert read(part, data, allow_outside=True) == PNG
    (data / "in.png").write_bytes(PNG)
    (data / "inner.png").symlink_to(data / "in.png")
    for name in ("in.png", "inner.png", str(data / "in.png"), "../data/in.png"):
        assert read({"type": "image", "image": name}, data) == PNG


def test_files_that_are_not_there(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty.png").touch()
    for name, message in (
        ("no.png", r"image \(no.png\): no such file in "),
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("loop", "cannot be read|no such file"),
        ("a\0b", "cannot be read"),
        ("x" * 400, "cannot be read: File name too long"),
        ("empty.png", r"empty, 0 bytes"),
        ("~/x.png", "no such file"),
        ("file:///etc/hostname", "no such file"),
    ):
        with pytest.raises(DataError, match=message):
            read({"type": "image", "image": name}, tmp_path)


def test_sizes(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    for value in ("a.png", PNG, f"data:image/png,{urllib.parse.quote_from_bytes(PNG)}"):
        part = {"type": "image", "image": value}
        with pytest.raises(DataError, match=r"more than data.media.max_bytes"):
            read(part, tmp_path, max_bytes=len(PNG) - 1)
        if value in ("a.png", PNG):
            assert read(part, tmp_path, max_bytes=len(PNG)) == PNG
    with pytest.raises(DataError, match=r"more than data.media.max_bytes = 100"):
        read({"type": "image", "image": TEXT}, tmp_path, max_bytes=100)


@pytest.mark.parametrize("text", [TEXT[:-1], TEXT[:200] + "!" + TEXT[200:], TEXT + "="])
def test_damaged_base64(text, tmp_path):
    with pytest.raises(DataError, match=r"part 1, base64 .*: not base64, or cut off"):
        read({"type": "image", "base64": text}, tmp_path)
    with pytest.raises(DataError, match=r"a data URL without a comma"):
        read({"type": "image", "image": "data:image/png;base64"}, tmp_path)


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path in ("/ftp", "/file"):
            self.send_response(302)
            self.send_header("Location", {"/ftp": "ftp://127.0.0.1/x", "/file": "file:///etc/hostname"}[self.path])
            self.end_headers()
        elif self.path == "/again":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
        elif self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PNG)
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address():
    server = http.server.HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_addresses(address, tmp_path):
    part = {"type": "image", "image": f"{address}/a.png"}
    with pytest.raises(DataError, match=r"a.png\): an address, and none is fetched; .*data.media.allow_urls"):
        read(part, tmp_path)
    assert read(part, tmp_path, allow_urls=True) == PNG
    assert read({"type": "image", "image": f"{address}/again"}, tmp_path, allow_urls=True) == PNG
    with pytest.raises(DataError, match=r"more than data.media.max_bytes"):
        read(part, tmp_path, allow_urls=True, max_bytes=10)
    for name, message in (("none", "the server answered 404"), ("ftp", "302|ftp"), ("file", "302|file")):
        with pytest.raises(DataError, match=message):
            read({"type": "image", "image": f"{address}/{name}"}, tmp_path, allow_urls=True)
    with pytest.raises(DataError, match=r"cannot be fetched: "):
        read({"type": "image", "image": "http://127.0.0.1:1/a.png"}, tmp_path, allow_urls=True, url_timeout_s=2.0)


def test_limits_are_checked():
    for wrong in ({"max_pixels": 0}, {"max_seconds": 0.0}, {"workers": 0}, {"max_pixels": 10**9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MediaConfig(**wrong)  # type: ignore[arg-type]
