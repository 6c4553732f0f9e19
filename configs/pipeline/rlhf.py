"""Fine-tuning, a reward model from preferences, and PPO against it: three runs that name each other's exports.

Command:   python -m tools.pipeline configs/pipeline/rlhf.py --workdir=runs/rlhf
One stage: python -m yatt_jax.main --config=configs/pipeline/rlhf.py:ppo --workdir=runs/rlhf/ppo
Hardware:  2 CPU cores, 8 GB of memory.
Task:      the digits task: completions to imitate, pairs of which one has a slip, and prompts. What PPO sees is the
           reward model alone; the rule behind the pairs is measured beside it.
Variants:  ``:small`` trains models from scratch, ``:tiny`` runs three steps of that; the default SmolLM2-135M-Instruct.
Own data:  change ``data.train`` and ``data.eval`` of each stage below, or say
           --set sft.data.train=FILE --set reward_model.data.train=FILE --set ppo.data.train=FILE.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits
from configs.tasks.digits_rows import digits_rows
from configs.tasks.stages import Stages, stage_config


def get_stages(folder: str, variant: str = "") -> Stages:
    """The stages in order, for runs in ``folder``; ``variant`` is "", "small" or "tiny"."""
    sft = digits_rows("sft", "completions", variant)
    reward_model = digits_rows("reward_model", "pairs", variant)
    ppo = digits("ppo", "tiny" if variant == "tiny" else "")
    if variant != "tiny":
        sft.steps = 12  # not to the end: something is left to learn from the reward
    reward_model.model.path = f"{folder}/sft/export"
    reward_model.model.tokenizer = ""
    ppo.model.path = f"{folder}/sft/export"
    ppo.model.tokenizer = ""
    ppo.model.critic = f"{folder}/reward_model/export"
    ppo.rewards = {
        # Rewards of a Bradley-Terry model have no scale of their own: they get the one of the first policy's responses.
        "model": {"model": f"{folder}/reward_model/export", "reference": 16 if variant == "tiny" else 256},
        "rule": {"fn": "yatt_jax.rewards.rules:digits", "weight": 0.0},
    }
    ppo.hyper.kl.place = "reward"
    ppo.hyper.kl.coef = 0.05
    ppo.rollout.prompts = 16 if variant == "tiny" else 128
    if variant == "":
        ppo.data.chat_template = "configs/data/chatml.jinja"
        ppo.data.max_prompt_tokens = 24
        ppo.rollout.prompts = 32
        ppo.rollout.sampling.max_new_tokens = 12
        ppo.actor_optimizer.lr = 1e-5
        ppo.critic_optimizer.lr = 1e-5
        ppo.train.micro_rows = 16
        ppo.steps = 24
    elif variant == "small":
        ppo.steps = 60
    return {"sft": sft, "reward_model": reward_model, "ppo": ppo}


def get_config(variant: str = "") -> ConfigDict:
    """The config of a stage, as ``STAGE[,VARIANT][,in=FOLDER]``; by default stages lie in ``runs/rlhf``."""
    return stage_config(get_stages, "runs/rlhf", variant)
