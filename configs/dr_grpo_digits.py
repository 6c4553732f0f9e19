"""Dr. GRPO on the digits task of ``ppo_digits``: plain differences to the group's mean, a constant length.

Command:   python -m yatt_jax.main --config=configs/dr_grpo_digits.py --workdir=runs/dr_grpo_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits_in_groups


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = digits_in_groups("dr_grpo", variant)
    config.hyper.aggregation.length = config.rollout.sampling.max_new_tokens
    return config.lock()
