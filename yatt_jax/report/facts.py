"""What a run ran on: versions, devices, command. Goes into config.json and from there into the report."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax

# Those that are not installed are left out.
_BACKENDS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")
_PACKAGES = ("yatt_jax", *_BACKENDS, "flax", "optax", "orbax-checkpoint", "transformers", "grain", "numpy")


class Here(TypedDict):
    """What one process says of itself; see ``Timeline.introduce``."""

    host: str
    devices: list[str]
    versions: dict[str, str]


def here() -> Here:
    """This process: its machine, its devices, and what has to be of one version on all of them."""
    names = [f"{device.device_kind} {device.id}" for device in jax.local_devices()]
    return {
        "host": socket.gethostname(),
        "devices": names,
        "versions": _versions(("yatt_jax", *_BACKENDS)),
    }


def gather(parameters: Mapping[str, int], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The facts of this run.

    Args:
      parameters: number of parameters of each role: actor, critic, ...
      argv: the command; by default how this process was started.

    Returns:
      "command", "started", "host", "versions", "devices", "parameters". "host" is the machine of this process; each
      process names its own in its timeline.
    """
    devices = jax.devices()
    of_process = Counter(device.process_index for device in devices)
    return {
        "command": command(sys.argv if argv is None else argv),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": {
            "name": socket.gethostname(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": os.cpu_count(),
        },
        "versions": {"python": platform.python_version(), **_versions(_PACKAGES)},
        "devices": {
            "count": len(devices),
            "kind": devices[0].device_kind,
            "platform": devices[0].platform,
            "processes": jax.process_count(),
            "per_process": [of_process[process] for process in range(jax.process_count())],
        },
        "parameters": dict(parameters),
    }


def command(argv: Sequence[str]) -> str:
    """The command line to type again; a module's file is written as ``python -m package.module``.

    Without what a launcher adds for each process: the coordinator, the number of processes, which one this is.
    """
    first, *rest = argv
    rest = [word for word in rest if not word.startswith(("--coordinator=", "--processes=", "--process="))]
    marker = f"{os.sep}yatt_jax{os.sep}main.py"
    start = ["python", "-m", "yatt_jax.main"] if first.endswith(marker) else [os.path.basename(first)]
    return shlex.join([*start, *rest])


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
