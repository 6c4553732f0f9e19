"""CISPO on the digits task of ``ppo_digits``: clipped importance weights, no token loses its gradient.

Command:   python -m yatt_jax.main --config=configs/cispo_digits.py --workdir=runs/cispo_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits_in_groups


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = digits_in_groups("cispo", variant)
    return config.lock()
