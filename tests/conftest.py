"""Shared by every test: the CPU as eight virtual devices, and compiled programs kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all time goes into compiling programs that run once on a few numbers.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
# Small programs are many, and each test makes them anew.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

import pytest

from yatt_jax.parallel.partition import Partition, Split, make_partitions


@pytest.fixture(scope="session")
def one_device() -> Partition:
    """The training partition of a single device."""
    return make_partitions(Split(), Split(), jax.devices()[:1])[0]
