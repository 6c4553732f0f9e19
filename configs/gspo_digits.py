"""GSPO on the digits task of ``ppo_digits``: one importance ratio a response.

Command:   python -m yatt_jax.main --config=configs/gspo_digits.py --workdir=runs/gspo_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits_in_groups


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = digits_in_groups("gspo", variant)
    config.hyper.clip.update(low=0.05, high=0.05)  # a model from scratch moves far in one update
    return config.lock()
