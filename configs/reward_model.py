"""Reward model by comparisons (Bradley-Terry); written as a sequence-classification folder.

Command:   python -m yatt_jax.main --config=configs/reward_model.py --workdir=runs/reward_model
Hardware:  2 CPU cores, 6 GB of memory.
Task:      the digits task as preferences: the right count against one with a slip;
           see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for preferences is in docs/usage.md.
           ``hyper.loss`` reads by how much the chosen response is better, as a margin or a weight.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("reward_model", "pairs", variant)
    return config.lock()
