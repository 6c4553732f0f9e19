"""KTO: responses that are wanted or not, without pairs.

Command:   python -m yatt_jax.main --config=configs/kto.py --workdir=runs/kto
Hardware:  2 CPU cores, 8 GB of memory.
Task:      the digits task as right counts and counts with a slip, see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for unpaired responses is in docs/usage.md.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("kto", "unpaired", variant)
    return config.lock()
