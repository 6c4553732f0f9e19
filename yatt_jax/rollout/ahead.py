"""Compiling an engine's programs before they are called, in a thread of its own, without touching a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from yatt_jax.rollout.device import Programs
from yatt_jax.types import PyTree


class Ahead:
    """Stands in for ``device.Programs``: each program is compiled, and returns what its results would look like.

    What it compiles, jax keeps: calling the program afterwards compiles nothing. Nothing runs, so that another thread
    may use the same devices meanwhile; two threads that ran programs on the same devices could each wait in a
    collective for devices that the other holds.

    Args:
      programs: that are compiled.
    """

    def __init__(self, programs: Programs):
        self.capacity = programs.capacity
        self.lay_out = _compiler(programs.lay_out)
        self.start = _compiler(programs.start)
        self.prefill = _compiler(programs.prefill)
        self.extend = _compiler(programs.extend)
        self.copy = _compiler(programs.copy)
        self.clear = _compiler(programs.clear)
        self.admit = _compiler(programs.admit)
        self.decode = _compiler(programs.decode)
        self.pick = _compiler(programs.pick)


def like(tree: PyTree) -> PyTree:
    """Shape, dtype and sharding of arrays, in their place."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _compiler(program: Any) -> Callable[..., Any]:
    def compile_only(*args: Any) -> Any:
        lowered = program.lower(*args)
        compiled = lowered.compile()
        return jax.tree.map(
            lambda out, where: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=where),
            lowered.out_info,
            compiled.output_shardings,
        )

    return compile_only
