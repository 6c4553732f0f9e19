"""Distillation from a frozen teacher on given texts.

Command:   python -m yatt_jax.main --config=configs/distill_teacher.py --workdir=runs/distill_teacher
Hardware:  2 CPU cores, 6 GB of memory.
Task:      the digits task as completions, see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for texts is in docs/usage.md.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("distill_teacher", "completions", variant)
    if variant:
        config.model.teacher = "configs/data/digits_teacher"
    else:  # a third of the layers, from scratch
        config.model.teacher = config.model.path
        config.model.tokenizer = config.model.path
        config.model.path = ""
        config.model.init.update(hidden=576, layers=10, heads=9, kv_heads=3, head_dim=64, mlp=1536, max_positions=2048)
        config.optimizer.lr = 3e-4
    return config.lock()
