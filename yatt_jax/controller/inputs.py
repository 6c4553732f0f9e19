"""What a run reads beside weights: its prompts and its rewards. Opening them checks them."""

from __future__ import annotations

import dataclasses

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.data.prompts import PromptSource
from yatt_jax.rewards import Scorer, build
from yatt_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Inputs:
    """This process's prompts, its share of the held-out ones, and the rewards."""

    prompts: PromptSource
    held_out: list[Prompt]
    scorer: Scorer


def open_inputs(plan: OnlinePlan, hosts: Hosts) -> Inputs:
    """Opens data and rewards.

    Raises:
      InputError: files that are missing or malformed, functions that do not exist or do not take their arguments.
    """
    config = plan.config
    prompts = PromptSource(
        config.data,
        plan.tokenizer,
        prompts_per_step=config.rollout.prompts,
        seed=config.seed,
        process_index=hosts.process,
        process_count=hosts.count,
    )
    held_out = prompts.evaluation(config.evaluation.prompts) if config.evaluation.every else []
    scorer = build(
        config.rewards,
        on_error=config.reward_on_error,
        workers=config.reward_workers,
        column=config.reward_column,
    )
    return Inputs(prompts, held_out, scorer)
