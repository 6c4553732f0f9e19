"""SimPO: preferences without a reference, by mean log-probability and a margin.

Command:   python -m yatt_jax.main --config=configs/simpo.py --workdir=runs/simpo
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
    config = digits_rows("simpo", "pairs", variant)
    return config.lock()
