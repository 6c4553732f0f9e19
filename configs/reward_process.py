"""Process reward model: each step of a solution is right or wrong.

Command:   python -m yatt_jax.main --config=configs/reward_process.py --workdir=runs/reward_process
Hardware:  2 CPU cores, 6 GB of memory.
Task:      the digits task as steps, one a digit, see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for rated steps is in docs/usage.md.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("reward_process", "steps", variant)
    return config.lock()
