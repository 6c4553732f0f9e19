"""A scoring server on loopback that misbehaves as it is told."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler", dict[str, Any]], None]


class StandIn:
    """The server.

    Attributes:
      url: its address.
      script: what it does with the next requests, one entry each; then it answers as ``otherwise`` says.
      requests: the objects that were posted, in the order they came.
      headers: of the same requests.
      scored: how often each completion was given a reward.
    """

    def __init__(self, script: list[Behaviour], otherwise: Behaviour) -> None:
        self.script, self.otherwise = script, otherwise
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.scored: dict[str, int] = {}
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.stand_in = self  # type: ignore[attr-defined]
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """Reads a request and does what the script says next."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        stand_in: StandIn = self.server.stand_in  # type: ignore[attr-defined]
        posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stand_in.lock:
            stand_in.requests.append(posted)
            stand_in.headers.append(dict(self.headers) | {"path": self.path})
            behaviour = stand_in.script.pop(0) if stand_in.script else stand_in.otherwise
        with contextlib.suppress(OSError):
            behaviour(self, posted)

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, size: int = -1) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size < 0 else size))
        self.end_headers()
        self.wfile.write(body)

    def hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def completions(posted: dict[str, Any]) -> list[str]:
    """The completions in a request."""
    return [one["completion"] for one in posted["samples"]]


def lengths(handler: Handler, posted: dict[str, Any]) -> None:
    """Rewards: the length of each completion."""
    stand_in: StandIn = handler.server.stand_in  # type: ignore[attr-defined]
    with stand_in.lock:
        for text in completions(posted):
            stand_in.scored[text] = stand_in.scored.get(text, 0) + 1
    handler.answer(json.dumps({"rewards": [len(text) for text in completions(posted)]}).encode())


def status(code: int, body: bytes = b"no", **headers: str) -> Behaviour:
    """Answers with a status."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, posted: handler.answer(body, code, named)


def says(body: bytes) -> Behaviour:
    """Answers 200 with these bytes."""
    return lambda handler, posted: handler.answer(body)


def half(handler: Handler, posted: dict[str, Any]) -> None:
    """Announces more than it sends, and hangs up."""
    handler.answer(b'{"rewards": [1.0', size=100)
    handler.hang_up()


def hang_up(handler: Handler, posted: dict[str, Any]) -> None:
    """Closes the connection without a word."""
    handler.hang_up()


def sleep(seconds: float) -> Behaviour:
    """Answers well, but late."""

    def late(handler: Handler, posted: dict[str, Any]) -> None:
        time.sleep(seconds)
        lengths(handler, posted)

    return late


def drip(seconds: float) -> Behaviour:
    """Sends a byte now and then, so that the connection never falls silent."""

    def slowly(handler: Handler, posted: dict[str, Any]) -> None:
        handler.answer(b"", size=10_000)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            handler.wfile.write(b" ")
            time.sleep(0.02)
        handler.hang_up()

    return slowly


@contextlib.contextmanager
def standing_in(*script: Behaviour, otherwise: Behaviour = lengths) -> Iterator[StandIn]:
    """A server for the block."""
    server = StandIn(list(script), otherwise)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def garbage() -> Iterator[str]:
    """The address of a port where something else than HTTP answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
                        connection.settimeout(1)
                        while connection.recv(65536):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        done.set()
        thread.join()


def free_port() -> int:
    """A port at which nobody listens."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]
