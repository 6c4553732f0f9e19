"""What a run reads beside weights: its prompts and its rewards. Opening them checks them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.controller.reward_models import RewardModel, TextScorer
from yatt_jax.data.answered import AnsweredReader
from yatt_jax.data.prompts import PromptSource
from yatt_jax.rewards import RewardFn, Scorer, build
from yatt_jax.rewards.spec import load_function
from yatt_jax.types import Params, Prompt, Sample

Vote = Callable[[list[Sample]], Sequence[str | None]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """This process's prompts, its share of the held-out ones, the rewards, and what reads answers, if anything does."""

    prompts: PromptSource
    held_out: list[Prompt]
    scorer: Scorer
    vote: Vote | None


def open_inputs(plan: OnlinePlan, hosts: Hosts, weights: Callable[[str], Params] | None = None) -> Inputs:
    """Opens data and rewards.

    Args:
      plan: the run.
      hosts: this process among those of the job.
      weights: gives the parameters of a role, once samples are scored; None where none will be.

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
    models = {} if weights is None else _reward_models(plan, hosts, weights)
    models = models or dict.fromkeys(plan.reward_models, _unscored)
    scorer = build(
        config.rewards,
        on_error=config.reward_on_error,
        workers=config.reward_workers,
        models=models,
        column=config.reward_column,
    )
    return Inputs(prompts, held_out, scorer, vote)


def _reward_models(plan: OnlinePlan, hosts: Hosts, weights: Callable[[str], Params]) -> dict[str, RewardFn]:
    """Each reward that names a model, as a function of samples."""
    train = plan.config.train
    found: dict[str, RewardFn] = {}
    for name, planned in plan.reward_models.items():
        rows = train.score_rows or train.micro_rows or plan.rows
        budget = train.micro_tokens if train.micro_tokens and not train.score_rows else rows * planned.max_tokens
        scorer = TextScorer(
            planned.model,
            plan.train,
            hosts,
            rows=plan.rows,
            max_tokens=planned.max_tokens,
            budget=budget,
            pack_tokens=train.pack_tokens,
            steps=planned.spec.steps,
        )
        found[name] = RewardModel(planned, scorer, functools.partial(weights, planned.role))
    return found


def _unscored(samples: Sequence[Sample]) -> list[float]:
    raise RuntimeError("these inputs were opened to be checked, without the weights of a reward model")
