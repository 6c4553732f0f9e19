"""PPO on a tiny model from scratch that must learn to count from the reward alone: the learning gate.

Command:   python -m yatt_jax.main --config=configs/ppo_digits.py --workdir=runs/digits
Hardware:  2 CPU cores, 1 GB of memory.
Task:      ``yatt_jax.rewards.rules:digits``: to "274" the right response is "56789" and its end. The best reward is 1.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = digits("ppo", variant)
    config.rollout.prompts = 16 if variant == "tiny" else 128
    config.hyper.gamma = 1.0
    config.hyper.lam = 0.95
    config.hyper.epochs = 4
    config.hyper.entropy_coef = 0.05
    config.critic_optimizer.lr = 2e-3
    return config.lock()
