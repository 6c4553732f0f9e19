"""The command: ``python -m yatt_jax.serve --config=configs/serve/NAME.py --role=reward|critic|judge --port=P``.

Serves the model that ``config.path`` names until it is told to stop (SIGTERM, Ctrl-C): then it takes no new
connections, answers what it was asked, and ends with exit status 0. Bad input ends with 2 and a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import cast

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from yatt_jax.command import parse_flags, reason, use_compilation_cache
from yatt_jax.errors import InputError
from yatt_jax.serve.config import Role, ServeConfig
from yatt_jax.typed import from_dict

FLAGS = flags.FLAGS
_ROLES = ["reward", "critic", "judge"]


def main(argv: Sequence[str]) -> None:
    """Serves as the flags describe."""
    if len(argv) > 1:
        raise InputError(f"unexpected argument {argv[1]!r}: settings are given as --config.KEY=VALUE")
    if not FLAGS["config"].present:
        raise InputError("--config is missing: name a file, as --config=configs/serve/model.py")
    if FLAGS.role not in _ROLES:
        raise InputError(f"--role={FLAGS.role}: expected one of {', '.join(_ROLES)}")
    if not 0 <= FLAGS.port < 65536:
        raise InputError(f"--port={FLAGS.port}: expected a number from 0 (any free one) to 65535")
    try:
        given = FLAGS.config.to_dict()
    except OSError as error:
        raise InputError(reason(error)) from error
    faults: list[str] = []
    config = from_dict(ServeConfig, given, "config", faults)
    if faults:
        raise InputError("\n".join(faults))
    serve(config, cast(Role, FLAGS.role), FLAGS.port)


def serve(config: ServeConfig, role: Role, port: int) -> None:
    """Serves until a signal comes.

    Raises:
      InputError: a missing package, token or model, or an address that cannot be listened at.
    """
    try:
        import uvicorn

        from yatt_jax.serve.app import make_app
        from yatt_jax.serve.measures import Measures
    except ModuleNotFoundError as error:
        raise InputError(f"serving needs {error.name}: pip install 'yatt_jax[serve]'") from error
    token = os.environ.get(config.token_env, "") if config.token_env else ""
    if config.token_env and not token:
        raise InputError(f"config.token_env = {config.token_env!r}: the environment variable is not set")
    # The address is taken first: a model may take minutes to load.
    with _listening(config.host, port) as sock:
        use_compilation_cache(config.compilation_cache)
        from yatt_jax.serve.load import make_service

        measures = Measures()
        service = make_service(config, role, measures)

        class Server(uvicorn.Server):
            """Stops at a signal with exit status 0, and says when it can be asked."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                loop = asyncio.get_running_loop()
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self.handle_exit, number, None)
                yield

        settings = uvicorn.Config(
            make_app(service, config.limits, measures, token),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            h11_max_incomplete_event_size=64 << 10,
            timeout_graceful_shutdown=int(config.limits.drain_s) or 1,
        )
        host, at = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"{role} of {config.path} at http://{host}:{at}{service.path}", flush=True)
        asyncio.run(Server(settings).serve(sockets=[sock]))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise InputError(f"{host}, port {port}: cannot be listened at: {error.strerror or error}") from error


def run_command() -> None:
    """Entry point of the command."""
    absl_logging.set_verbosity(absl_logging.WARNING)
    config_flags.DEFINE_config_file("config", None, "Config file of a server.", lock_config=True)
    flags.DEFINE_string("role", "reward", "What the model is: reward, critic or judge.")
    flags.DEFINE_integer("port", 8000, "Port to listen at; 0: any free one, which is printed.")
    try:
        app.run(main, flags_parser=lambda argv: parse_flags(argv, ["config", "role", "port"]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)


if __name__ == "__main__":
    run_command()
