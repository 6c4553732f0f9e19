"""ORPO: likelihood of the chosen response and its odds above the rejected one, without a reference.

Command:   python -m yatt_jax.main --config=configs/orpo.py --workdir=runs/orpo
Hardware:  2 CPU cores, 6 GB of memory.
Task:      the digits task as preferences: the right count against one with a slip;
           see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for preferences is in docs/usage.md.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("orpo", "pairs", variant)
    return config.lock()
