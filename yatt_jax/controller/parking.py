"""What waits in host memory while the actor samples, so that its place on the devices serves the cache."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import jax

from yatt_jax.parallel.park import fetch, park
from yatt_jax.parallel.repartition import free, release
from yatt_jax.types import Params, TrainState

# What is parked: nothing, the optimizers' state, or all but the actor's weights.
Parked: TypeAlias = Literal["none", "optimizer", "all"]


class Parking:
    """Parks states and frozen weights, and brings them back.

    Args:
      kind: what is parked.
      states: role -> state, changed in place.
      frozen: role -> weights that no update changes, the same.
    """

    def __init__(self, kind: Parked, states: dict[str, TrainState], frozen: dict[str, Params]):
        self._kind, self._states, self._frozen = kind, states, frozen
        self._on_host: dict[str, Params] = {}  # frozen weights go to the host once, and are copied back from there
        self._away: list[str] = []

    def leave(self, sampler: str = "actor") -> None:
        """Starts to move out what is parked; does not wait for it.

        Args:
          sampler: the role that samples: its weights stay, and so do the actor's.
        """
        if self._kind == "none":
            return
        for role, state in self._states.items():
            whole = self._kind == "all" and role != "actor"
            self._states[role] = park(state) if whole else dataclasses.replace(state, opt=park(state.opt))
        if self._kind == "all":
            self._away = [role for role in self._frozen if role != sampler]
            for role in self._away:
                weights = self._frozen[role]
                if role in self._on_host:
                    release(weights, self._on_host[role])
                else:
                    self._on_host[role] = park(weights)
                self._frozen[role] = self._on_host[role]

    def come_back(self) -> None:
        """Starts to bring everything back; a program that reads it waits for it, and nothing else does."""
        if self._kind == "none":
            return
        for role, state in self._states.items():
            self._states[role] = fetch(state)
        for role in self._away:
            self._frozen[role] = fetch(self._on_host[role], keep=True)

    def renew(self, role: str, weights: Params) -> None:
        """Puts other weights in the place of frozen ones, which are freed."""
        free(jax.tree.leaves((self._frozen[role], self._on_host.pop(role, None))))
        self._frozen[role] = weights
