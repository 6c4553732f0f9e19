"""One HTTP connection, on which a request ends by its deadline whatever the server does."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, cast

from yatt_jax.errors import InputError

MAX_ANSWER_BYTES = 256 << 20


class AnswerTooLong(Exception):
    """An answer of more than ``MAX_ANSWER_BYTES``."""


class Connection:
    """A kept-alive connection to one server; used by one thread at a time.

    A socket's own time limit starts anew with every byte that comes; here the deadline is that of the whole request.

    Args:
      url: ``http://HOST:PORT`` or ``https://...``; a path in it goes before that of each request.

    Raises:
      InputError: another scheme, or no host.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url!r}: expected a server as http://HOST:PORT or https://HOST:PORT")
        try:
            port = parts.port
        except ValueError as error:
            raise InputError(f"{url!r}: {error}") from error
        self._prefix = parts.path.rstrip("/")
        if parts.scheme == "https":
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, port, context=ssl.create_default_context()
            )
        else:
            self._http = http.client.HTTPConnection(parts.hostname, port)

    def post(self, path: str, body: bytes, headers: Mapping[str, str], deadline: float) -> tuple[int, bytes, str]:
        """Sends a request and reads the whole answer.

        Args:
          path: of the request.
          body: of the request.
          headers: of the request.
          deadline: ``time.monotonic()`` at which it ends.

        Returns:
          Status, body, and what the answer says under Retry-After.

        Raises:
          TimeoutError: at the deadline.
          OSError: no connection, or a broken one.
          http.client.HTTPException: an answer that is no HTTP, or half of one.
          AnswerTooLong: a body above the limit.
        """
        try:
            for fresh in (self._http.sock is None, True):
                try:
                    return self._exchange(path, body, headers, deadline)
                except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                    self.close()
                    if fresh:
                        raise
                    # A server may close an idle connection at any time: that is no fault of this request.
            raise AssertionError
        except BaseException:
            self.close()
            raise

    def _exchange(self, path: str, body: bytes, headers: Mapping[str, str], deadline: float) -> tuple[int, bytes, str]:
        if self._http.sock is None:
            self._http.timeout = _left(deadline)
            self._http.connect()
            self._http.sock = cast(socket.socket, _Timed(cast(Any, self._http.sock)))
        cast(_Timed, self._http.sock).deadline = deadline
        self._http.request("POST", self._prefix + path, body, dict(headers))
        with self._http.getresponse() as answer:
            content = answer.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise AnswerTooLong
            if answer.length:  # ``read`` with a size does not tell that the end is missing
                raise http.client.IncompleteRead(content, answer.length)
            return answer.status, content, answer.getheader("Retry-After", "")

    def close(self) -> None:
        """Closes it; the next request opens it again."""
        self._http.close()


class _Timed:
    """As much of a socket as ``http.client`` uses; each operation gets what is left until the deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline = 0.0

    def sendall(self, data: Any) -> None:
        self._sock.settimeout(_left(self.deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reader(self, self._sock))

    def close(self) -> None:
        self._sock.close()


class _Reader(io.RawIOBase):
    """The bytes of a socket; it stays open until this is closed, too."""

    def __init__(self, timed: _Timed, sock: socket.socket) -> None:
        self._timed, self._sock = timed, sock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._timed.deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
