"""Reward model by regression on attributes; written as a sequence-classification folder.

Command:   python -m yatt_jax.main --config=configs/reward_regression.py --workdir=runs/reward_regression
Hardware:  2 CPU cores, 6 GB of memory.
Task:      the digits task as texts with two attributes, the share of right digits and the length;
           see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for labels is in docs/usage.md.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("reward_regression", "ratings", variant)
    config.hyper.attributes = 2
    if variant == "small":
        config.steps = 240
    return config.lock()
