"""Distillation from logits of a teacher that a file holds, the largest of each token.

Command:   python -m yatt_jax.main --config=configs/distill_topk.py --workdir=runs/distill_topk
Hardware:  2 CPU cores, 6 GB of memory.
Task:      what a teacher who is nearly sure says on the digits task, see ``configs/tasks/digits_rows.py``.
Variants:  ``:tiny`` runs three steps. There is no larger one: a file of logits is for one tokenizer.
Own data:  --config.data.train=FILE; every format for teachers' logits is in docs/usage.md.
"""

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "" or "tiny"."""
    config = digits_rows("distill_topk", "topk", variant or "small")
    return config.lock()
