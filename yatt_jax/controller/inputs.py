"""What a run reads beside weights: its prompts and its rewards. Opening them checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.data.answered import AnsweredReader
from yatt_jax.data.prompts import PromptSource
from yatt_jax.rewards import Scorer, build
from yatt_jax.rewards.spec import load_function
from yatt_jax.types import Prompt, Sample

Vote = Callable[[list[Sample]], Sequence[str | None]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """This process's prompts, its share of the held-out ones, the rewards, and what reads answers, if anything does."""

    prompts: PromptSource
    held_out: list[Prompt]
    scorer: Scorer
    vote: Vote | None


def open_inputs(plan: OnlinePlan, hosts: Hosts) -> Inputs:
    """Opens data and rewards.

    Raises:
      InputError: files that are missing or malformed, functions that do not exist or do not take their arguments.
    """
    config = plan.config
    longest_answer = config.rollout.sampling.max_new_tokens
    prompts = PromptSource(
        config.data,
        plan.tokenizer,
        prompts_per_step=config.rollout.prompts,
        seed=config.seed,
        process_index=hosts.process,
        process_count=hosts.count,
        reader=AnsweredReader(config.data, plan.tokenizer, longest_answer) if plan.answers else None,
    )
    evaluation = config.evaluation
    held_out = prompts.evaluation(evaluation.prompts) if evaluation.every else []
    vote = load_function(evaluation.vote, f"config.evaluation.vote = {evaluation.vote!r}") if evaluation.vote else None
    scorer = build(config.rewards, on_error=config.reward_on_error, workers=config.reward_workers)
    return Inputs(prompts, held_out, scorer, vote)
