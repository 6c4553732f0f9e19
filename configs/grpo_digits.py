"""GRPO on the digits task of ``ppo_digits``: no critic, eight responses to each prompt are each other's baseline.

Command:   python -m yatt_jax.main --config=configs/grpo_digits.py --workdir=runs/grpo_digits
Hardware:  2 CPU cores, 1 GB of memory.
Variants:  ``:tiny`` runs three steps. ``:shuffled`` deals the rewards out to the wrong samples: it must not learn.
"""

from ml_collections import ConfigDict

from yatt_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "", "tiny" or "shuffled"."""
    config = default_config("grpo")
    config.model.tokenizer = "characters:0123456789"
    config.model.init.hidden = 64
    config.model.init.layers = 2
    config.model.init.mlp = 256
    config.model.init.tied = False
    config.model.remat = "none"
    config.data.train = ("configs/data/digits_train.jsonl",)
    config.data.eval = ("configs/data/digits_eval.jsonl",)
    config.data.max_prompt_tokens = 3
    config.rollout.prompts = 32
    config.rollout.samples_per_prompt = 8
    config.rollout.sampling.max_new_tokens = 10
    config.rewards = {"digits": {"fn": "yatt_jax.rewards.rules:digits", "weight": 1.0, "kwargs": {}, "chunk": 0}}
    config.hyper.kl.place = "none"
    config.hyper.epochs = 2
    config.hyper.minibatches = 2
    config.hyper.entropy_coef = 0.02
    config.actor_optimizer.lr = 2e-3
    config.train.micro_rows = 0
    config.steps = 160
    config.evaluation.every = 10
    config.evaluation.prompts = 60
    config.report.tensorboard = False
    if variant == "tiny":
        config.steps = 3
        config.rollout.prompts = 4
    elif variant == "shuffled":
        config.rewards["digits"]["fn"] = "yatt_jax.rewards.rules:shuffled"
    elif variant:
        raise ValueError(f"grpo_digits has no variant {variant!r}; there are 'tiny' and 'shuffled'")
    return config.lock()
