"""REINFORCE++ on the digits task of ``ppo_digits``: PPO's token rewards, no critic, advantages whitened over the step.

Command:   python -m yatt_jax.main --config=configs/reinforce_pp_digits.py --workdir=runs/reinforce_pp_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
           ``:baseline`` takes the mean of its group off each score first.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits_in_groups


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny", "shuffled" or "baseline"."""
    config = digits_in_groups("reinforce_pp", "" if variant == "baseline" else variant)
    if variant == "baseline":
        config.hyper.baseline = "group_mean"
    else:  # nothing is compared within groups
        config.rollout.prompts *= config.rollout.samples_per_prompt
        config.rollout.samples_per_prompt = 1
    return config.lock()
