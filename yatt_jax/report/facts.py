"""What a run ran on: versions, devices, command. Goes into config.json and from there into the report."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

_PACKAGES = ("yatt_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "grain", "numpy")


def gather(parameters: Mapping[str, int], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The facts of this run.

    Args:
      parameters: number of parameters of each role: actor, critic, ...
      argv: the command; by default how this process was started.

    Returns:
      "command", "started", "host", "versions", "devices", "parameters".
    """
    devices = jax.devices()
    return {
        "command": command(sys.argv if argv is None else argv),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": {
            "name": socket.gethostname(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "devices": {
            "count": len(devices),
            "kind": devices[0].device_kind,
            "platform": devices[0].platform,
            "processes": jax.process_count(),
        },
        "parameters": dict(parameters),
    }


def command(argv: Sequence[str]) -> str:
    """The command line to type again; a module's file is written as ``python -m package.module``."""
    first, *rest = argv
    marker = f"{os.sep}yatt_jax{os.sep}main.py"
    start = ["python", "-m", "yatt_jax.main"] if first.endswith(marker) else [os.path.basename(first)]
    return shlex.join([*start, *rest])


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
