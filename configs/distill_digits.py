"""On-policy distillation on the digits task of ``ppo_digits``: a small teacher judges each token of what was sampled.

Command:   python -m yatt_jax.main --config=configs/distill_digits.py --workdir=runs/distill_digits
Hardware:  2 CPU cores, 1 GB of memory.
Task:      the reward of the task is only reported; the teacher, which knows it, is ``configs/data/digits_teacher``.
Variants:  ``:tiny`` runs three steps.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "" or "tiny"."""
    if variant == "shuffled":  # no reward trains anything here
        raise ValueError("distill_digits has no variant 'shuffled'; there is 'tiny'")
    config = digits("distill", variant)
    config.model.teacher = "configs/data/digits_teacher"
    config.model.tokenizer = config.model.teacher
    config.rollout.prompts = 16 if variant == "tiny" else 128
    config.steps = 3 if variant == "tiny" else 60
    return config.lock()
