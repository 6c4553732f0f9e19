"""DAPO on the digits task of ``ppo_digits``: a wider clip above, a price of overlong responses, dynamic sampling.

Command:   python -m yatt_jax.main --config=configs/dapo_digits.py --workdir=runs/dapo_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits_in_groups


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = digits_in_groups("dapo", variant)
    config.rollout.sampling.max_new_tokens = 12
    config.hyper.reward.update(overlong_limit=12, overlong_cache=2)  # the longest right response has ten tokens
    config.rollout.dynamic.update(enabled=True, max_waves=3)
    return config.lock()
