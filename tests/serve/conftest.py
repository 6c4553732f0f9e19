"""Servers of tiny models, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve import models

ROOT = Path(__file__).parent.parent.parent


class Served:
    """A server process.

    Attributes:
      url: its address, without the path.
      process: it.
    """

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "yatt_jax.serve", "--config=configs/serve/model.py", "--port=0", *flags]
        settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", **(env or {})}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " at http://" not in line:
            raise AssertionError(f"no server: {line}{self.process.communicate()[1]}")
        self.url = line.split(" at ")[1].strip().rpartition("/")[0]

    def ask(self, path: str, posted: Any, **headers: str) -> tuple[int, Any]:
        """Status and answer."""
        body = posted if isinstance(posted, bytes) else json.dumps(posted).encode()
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> str:
        """The text at a path."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def stop(self) -> int:
        """Tells it to stop; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="session")
def serve(tmp_path_factory) -> Callable[..., Any]:
    """What starts a server of a role, with further flags, for a block."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    pytest.importorskip("prometheus_client")
    folder = tmp_path_factory.mktemp("models")
    cache = folder / "cache"

    @contextlib.contextmanager
    def start(role: str, *flags: str, env: dict[str, str] | None = None, path: str = "") -> Iterator[Served]:
        kind: Any = {"reward": "reward", "critic": "value", "judge": "lm"}[role]
        if not path and not (folder / role).exists():
            models.write(folder / role, kind)
        config = [f"--config.path={path or folder / role}", "--config.limits.tokens=64", "--config.batch.rows=8"]
        server = Served(f"--role={role}", *config, f"--config.compilation_cache={cache}", *flags, env=env)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                assert server.stop() == 0

    start.folder = folder  # type: ignore[attr-defined]
    return start
