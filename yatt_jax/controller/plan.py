"""What a run will do, worked out and checked before a weight is read or a program compiled."""

from __future__ import annotations

from typing import overload

from yatt_jax.config import OfflineRun, OnlineRun
from yatt_jax.controller.offline_plan import OfflinePlan, make_offline_plan
from yatt_jax.controller.online_plan import OnlinePlan, make_online_plan


@overload
def make_plan(config: OnlineRun) -> OnlinePlan: ...
@overload
def make_plan(config: OfflineRun) -> OfflinePlan: ...
def make_plan(config: OnlineRun | OfflineRun) -> OnlinePlan | OfflinePlan:
    """Works a run out and checks it: files exist, axes divide, sizes fit together. Reads no weights.

    Raises:
      ConfigError: with every fault that was found.
      InputError: a file that cannot be read.
    """
    return make_offline_plan(config) if isinstance(config, OfflineRun) else make_online_plan(config)
