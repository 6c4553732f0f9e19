"""Devices of TPU slices that are not there, to compile for: how much memory a program needs, before it is run."""

from __future__ import annotations

import os
from typing import Any

from jax.experimental import topologies

from yatt_jax.errors import InputError


def described_devices(name: str) -> list[Any]:
    """The devices of a TPU slice by its name, such as "v5e:2x4"; programs compile for them but never run.

    Raises:
      InputError: libtpu is not installed, or knows no such slice.
    """
    # The compiler library otherwise asks a cloud machine's metadata server which TPU it hangs on.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except RuntimeError as error:
        raise InputError(
            f"--topology={name}: {error}; compiling for TPUs needs libtpu (pip install 'jax[tpu]'), and a name such "
            "as v5e:2x4 or v5p:2x2x4"
        ) from error
