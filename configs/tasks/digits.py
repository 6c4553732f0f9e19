"""The digits task, for any online algorithm: a tiny model from scratch must learn to count from the reward alone.

``yatt_jax.rewards.rules:digits``: to "274" the right response is "56789" and its end. The best reward is 1.
"""

from typing import Any

from yatt_jax.config import default_config


def digits(algo: str, variant: str) -> Any:
    """A config of the task, still open, for a config file to finish.

    Args:
      algo: the algorithm.
      variant: "", "tiny" (three steps; the config file takes fewer prompts), or "shuffled" (each sample gets another
        one's reward, so that there is nothing to learn).

    Raises:
      ValueError: another variant.
    """
    if variant not in ("", "tiny", "shuffled"):
        raise ValueError(f"{algo}_digits has no variant {variant!r}; there are 'tiny' and 'shuffled'")
    reward = "shuffled" if variant == "shuffled" else "digits"
    config = default_config(algo)
    config.model.tokenizer = "characters:0123456789"
    config.model.init.hidden = 64
    config.model.init.layers = 2
    config.model.init.mlp = 256
    config.model.init.tied = False
    config.model.remat = "none"
    config.data.train = ("configs/data/digits_train.jsonl",)
    config.data.eval = ("configs/data/digits_eval.jsonl",)
    config.data.max_prompt_tokens = 3
    config.rollout.sampling.max_new_tokens = 10
    config.rewards = {"digits": {"fn": f"yatt_jax.rewards.rules:{reward}", "weight": 1.0, "kwargs": {}, "chunk": 0}}
    if "kl" in config.hyper:
        config.hyper.kl.place = "none"
    config.hyper.minibatches = 2
    config.actor_optimizer.lr = 2e-3
    config.train.micro_rows = 0
    config.steps = 3 if variant == "tiny" else 160
    config.evaluation.every = 10
    config.evaluation.prompts = 60
    config.report.tensorboard = False
    return config


def digits_in_groups(algo: str, variant: str) -> Any:
    """The same for an algorithm without a critic: several responses to each prompt, compared with each other.

    Args:
      algo: the algorithm.
      variant: as of ``digits``.

    Raises:
      ValueError: another variant.
    """
    config = digits(algo, variant)
    config.rollout.prompts = 4 if variant == "tiny" else 32
    config.rollout.samples_per_prompt = 8
    config.hyper.epochs = 2
    config.hyper.entropy_coef = 0.02
    config.steps = 3 if variant == "tiny" else 60
    return config
