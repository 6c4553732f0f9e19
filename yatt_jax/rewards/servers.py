"""Several servers that answer the same requests: which one is asked, what is tried again, and when to give up."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from yatt_jax.errors import InputError
from yatt_jax.rewards.connection import MAX_ANSWER_BYTES, AnswerTooLong, Connection
from yatt_jax.rewards.counts import Counts

_log = logging.getLogger(__name__)


class RequestFailed(Exception):
    """A request that got no usable answer; the message says from whom, how often it was tried, and why."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """When a request is tried again, and when it is given up.

    Attributes:
      timeout_s: seconds one try may take.
      deadline_s: seconds a request may take with all its tries and pauses.
      tries: most tries.
      pause_s: mean pause before the second try; it doubles with each further one.
      longest_pause_s: most that a pause grows to, whatever a server asks for.
      dead_after: failures in a row after which a server is set aside, if there are others.
      revive_s: seconds until a server that was set aside is tried again; doubles while it stays dead, up to 16 times.
    """

    timeout_s: float = 60.0
    deadline_s: float = 300.0
    tries: int = 5
    pause_s: float = 0.5
    longest_pause_s: float = 10.0
    dead_after: int = 2
    revive_s: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} = {getattr(self, field.name)}: must be above 0")


class _Again(Exception):
    """A try that failed and may be made again.

    Attributes:
      dead: whether the server is at fault, and not only busy.
      pause_s: what the server asks for; 0: nothing.
    """

    def __init__(self, reason: str, *, dead: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.dead, self.pause_s = dead, pause_s


class _Server:
    """One server, its idle connections, and what is known of its health; guarded by the pool's lock."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: list[Connection] = [Connection(url)]
        self.running = 0
        self.failures = 0
        self.aside = 0  # how often in a row it was set aside
        self.not_before = 0.0  # time.monotonic() until which others are preferred


class Servers:
    """Posts JSON to the least busy of several servers; safe to use from several threads.

    Tried again, on another server where there is one: refused and broken connections, tries that take too long, half an
    answer, and the statuses 408, 425, 429 and 5xx. Given up at once: every other status, and an answer that is no JSON.

    Args:
      urls: of the servers, all equal.
      patience: when to try again.
      token_env: environment variable that holds the bearer token; empty: none is sent.
      counts: gets ``retries``, and ``servers_dropped``.

    Raises:
      InputError: a malformed address, none at all, or an environment variable that is not set.
    """

    def __init__(self, urls: Sequence[str], patience: Patience, token_env: str, counts: Counts) -> None:
        if not urls:
            raise InputError("urls is empty: name at least one server, as 'http://127.0.0.1:8000'")
        self._servers = [_Server(url) for url in urls]
        self._patience, self._counts = patience, counts
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token_env:
            token = os.environ.get(token_env, "").strip()
            if not token or not token.isascii() or not token.isprintable():
                raise InputError(f"token_env = {token_env!r}: the environment variable is not set to a printable token")
            self._headers["Authorization"] = f"Bearer {token}"
        self._lock = threading.Lock()
        self._closed = threading.Event()
        for name in ("retries", "servers_dropped"):
            counts.add(name, 0)

    def close(self) -> None:
        """Ends pauses and closes idle connections; requests under way end with their try."""
        self._closed.set()
        with self._lock:
            for server in self._servers:
                while server.idle:
                    server.idle.pop().close()

    def post(self, path: str, payload: Mapping[str, Any], deadline: float | None = None) -> Any:
        """Posts an object and returns the one that is answered.

        Args:
          path: of the request, as "/score".
          payload: what JSON can hold.
          deadline: ``time.monotonic()`` at which the caller wants to be done, if that is before the patience ends.

        Raises:
          RequestFailed: no usable answer.
          InputError: the server does not know the token or the path (401, 403, 404, 405); JSON cannot hold the payload.
        """
        patience = self._patience
        ends = time.monotonic() + patience.deadline_s
        ends = ends if deadline is None else min(ends, deadline)
        try:
            body = json.dumps(payload, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"a request to {path} holds what JSON cannot: {error}") from error
        reasons: list[str] = []
        for tried in range(1, patience.tries + 1):
            server = self._choose()
            try:
                return self._try(server, path, body, ends)
            except _Again as error:
                self._failed(server, error)
                reasons.append(f"{server.url}{path}: {error}")
                pause = error.pause_s or patience.pause_s * 2 ** (tried - 1) * random.uniform(0.5, 1.5)
                pause = 0.0 if self._well(server) else min(pause, patience.longest_pause_s)
                if tried == patience.tries or time.monotonic() + pause >= ends or self._closed.wait(pause):
                    break
                self._counts.add("retries")
        tries = f"{len(reasons)} {'try' if len(reasons) == 1 else 'tries'}"
        raise RequestFailed(f"{reasons[-1]} (given up after {tries})" if reasons else "the deadline has passed")

    def _well(self, apart_from: _Server) -> bool:
        """Whether another server is there that need not be spared."""
        now = time.monotonic()
        return any(s is not apart_from and not s.failures and s.not_before <= now for s in self._servers)

    def _choose(self) -> _Server:
        """The least busy of the servers that may be asked; if there are none, the one whose turn comes first."""
        with self._lock:
            now = time.monotonic()
            server = min(self._servers, key=lambda s: (max(s.not_before - now, 0.0), s.running))
            server.running += 1
            if server.aside:  # one request finds out whether it is back; the others go elsewhere meanwhile
                server.not_before = now + self._revival(server)
            return server

    def _try(self, server: _Server, path: str, body: bytes, ends: float) -> Any:
        with self._lock:
            connection = server.idle.pop() if server.idle else Connection(server.url)
        start = time.monotonic()
        until = min(ends, start + self._patience.timeout_s)
        try:
            status, content, retry_after = connection.post(path, body, self._headers, until)
        except TimeoutError as error:
            raise _Again(f"no answer in {until - start:.3g} s") from error
        except (http.client.RemoteDisconnected, http.client.IncompleteRead) as error:
            raise _Again("the answer broke off") from error
        except http.client.HTTPException as error:
            raise RequestFailed(f"{server.url}{path}: no HTTP comes from there; is the port right?") from error
        except AnswerTooLong as error:
            raise RequestFailed(f"{server.url}{path}: answered more than {MAX_ANSWER_BYTES >> 20} MiB") from error
        except ssl.SSLCertVerificationError as error:
            raise RequestFailed(
                f"{server.url}{path}: its certificate is not trusted: {error.verify_message}"
            ) from error
        except OSError as error:
            raise _Again(f"no connection ({error.strerror or error})") from error
        finally:
            with self._lock:
                server.running -= 1
                if self._closed.is_set():
                    connection.close()
                else:
                    server.idle.append(connection)
        return self._read(server, path, status, content, retry_after)

    def _read(self, server: _Server, path: str, status: int, content: bytes, retry_after: str) -> Any:
        where = f"{server.url}{path}: status {status}"
        said = content[:300].decode("utf-8", "replace").strip()
        said = f": {said}" if said else ""
        if status == 429 or status == 503:
            raise _Again(f"status {status}{said}", dead=status == 503, pause_s=_seconds(retry_after))
        if status >= 500 or status in (408, 425):
            raise _Again(f"status {status}{said}")
        if status in (401, 403):
            raise InputError(f"{where}: the token is not accepted; see token_env{said}")
        if status in (404, 405):
            raise InputError(f"{where}: it takes no such request; see path{said}")
        if status != 200:
            raise RequestFailed(f"{where}{said}")
        with self._lock:
            if server.aside:
                _log.warning("%s answers again", server.url)
            server.failures = server.aside = 0
            server.not_before = 0.0
        try:
            return json.loads(content)
        except ValueError as error:
            raise RequestFailed(f"{server.url}{path}: answered what is no JSON{said}") from error

    def _failed(self, server: _Server, error: _Again) -> None:
        """Notes what a failure says of a server."""
        with self._lock:
            now = time.monotonic()
            if not error.dead:
                server.not_before = max(server.not_before, now + min(error.pause_s, self._patience.longest_pause_s))
                return
            server.failures += 1
            if server.failures >= self._patience.dead_after or server.aside:
                server.failures = 0
                if not server.aside:
                    self._counts.add("servers_dropped")
                    _log.warning("%s is set aside for a while: %s", server.url, error)
                server.aside = min(server.aside + 1, 5)
                server.not_before = now + self._revival(server)

    def _revival(self, server: _Server) -> float:
        return self._patience.revive_s * 2 ** max(server.aside - 1, 0)


def _seconds(retry_after: str) -> float:
    """What a Retry-After header asks for; a date is not looked at."""
    try:
        return max(float(retry_after), 0.0)
    except ValueError:
        return 0.0
