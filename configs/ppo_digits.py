"""PPO on a tiny model from scratch that must learn to count from the reward alone: the learning gate.

Command:   python -m yatt_jax.main --config=configs/ppo_digits.py --workdir=runs/digits
Hardware:  2 CPU cores, 1 GB of memory.
Task:      ``yatt_jax.rewards.rules:digits``: to "274" the right response is "56789" and its end. The best reward is 1.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from yatt_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = default_config("ppo")
    config.model.tokenizer = "characters:0123456789"
    config.model.init.hidden = 64
    config.model.init.layers = 2
    config.model.init.mlp = 256
    config.model.init.tied = False
    config.model.remat = "none"
    config.data.train = ("configs/data/digits_train.jsonl",)
    config.data.eval = ("configs/data/digits_eval.jsonl",)
    config.data.max_prompt_tokens = 3
    config.rollout.prompts = 128
    config.rollout.sampling.max_new_tokens = 10
    config.rewards = {"digits": {"fn": "yatt_jax.rewards.rules:digits", "weight": 1.0, "kwargs": {}, "chunk": 0}}
    config.hyper.kl.place = "none"
    config.hyper.gamma = 1.0
    config.hyper.lam = 0.95
    config.hyper.epochs = 4
    config.hyper.minibatches = 2
    config.hyper.entropy_coef = 0.05
    config.actor_optimizer.lr = 2e-3
    config.critic_optimizer.lr = 2e-3
    config.train.micro_rows = 0
    config.steps = 160
    config.evaluation.every = 10
    config.evaluation.prompts = 60
    config.report.tensorboard = False
    if variant == "tiny":
        config.steps = 3
        config.rollout.prompts = 16
    elif variant == "shuffled":
        config.rewards["digits"]["fn"] = "yatt_jax.rewards.rules:shuffled"
    elif variant:
        raise ValueError(f"ppo_digits has no variant {variant!r}; there are 'tiny' and 'shuffled'")
    return config.lock()
