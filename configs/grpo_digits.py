"""GRPO on the digits task of ``ppo_digits``: no critic, eight responses to each prompt are each other's baseline.

Command:   python -m yatt_jax.main --config=configs/grpo_digits.py --workdir=runs/grpo_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits_in_groups


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = digits_in_groups("grpo", variant)
    return config.lock()
