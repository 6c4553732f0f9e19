"""Direct preference optimisation against a frozen copy of the start.

Command:   python -m yatt_jax.main --config=configs/dpo.py --workdir=runs/dpo
Hardware:  2 CPU cores, 8 GB of memory.
Task:      the digits task as preferences: the right count against one with a slip;
           see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for preferences is in docs/usage.md.
           ``hyper.loss`` chooses IPO or one of the RPO losses; ``hyper.label_smoothing`` makes it cDPO.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("dpo", "pairs", variant)
    return config.lock()
