"""Supervised fine-tuning on texts of a prompt and its completion.

Command:   python -m yatt_jax.main --config=configs/sft.py --workdir=runs/sft
Hardware:  2 CPU cores, 6 GB of memory.
Task:      the digits task as completions, see ``configs/tasks/digits_rows.py``.
Variants:  ``:small`` trains a model from scratch, ``:tiny`` runs three steps of that.
Own data:  --config.data.train=FILE; every format for texts is in docs/usage.md. ``data.learn`` says which tokens are
           trained, ``data.pack`` packs short texts into rows of so many tokens.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "small" or "tiny"."""
    config = digits_rows("sft", "completions", variant)
    config.data.pack = 64 if variant else 128
    return config.lock()
