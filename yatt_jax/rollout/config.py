"""Settings of sampling."""

from __future__ import annotations

import dataclasses
from typing import Literal

from yatt_jax.rollout.dynamic import DynamicSampling
from yatt_jax.rollout.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How a step samples.

    Attributes:
      prompts: prompts a step.
      samples_per_prompt: responses to each.
      rows: rows sampled at a time on the devices; 0: all of the step's, or as many as ``cache_gib`` has room for.
      cache_gib: room for keys and values on each device, in GiB; 0: no limit.
      cache_dtype: of keys and values; "auto" is the compute dtype. A lower one samples from a slightly different policy
        than the one that is trained: see ``hyper.correction``.
      sampling: temperature, filters, lengths and stops.
      tail: what becomes of the slowest responses. "wait": each is sampled to its end. "abort": ``extra_prompts`` more
        are drawn, and sampling ends when ``prompts`` of them are answered; the others are given up, so that long
        responses are rarer than the policy makes them (``rollout/aborted_tokens`` beside ``rollout/response_length``
        shows it). "carry": likewise, but what is not ended goes on in the next step under newer weights. "ahead": the
        rows of up to ``max_staleness`` later steps are sampled before they are needed, so that their rewards (with
        ``reward_workers`` above 1) come in while others are trained.
      extra_prompts: prompts on their way beyond those that a step needs.
      budget: decode steps after which "carry" stops sampling, though fewer prompts are answered; 0: no limit.
      max_staleness: most steps between the weights that began a response and those that are trained on it. 0 is exactly
        synchronous; above, ratios start from the sampler (``hyper.old_logprobs``) or are corrected
        (``hyper.correction``).
      dynamic: drop groups whose responses all got the same reward, and draw others.
      filters_in_scoring: "auto" records which vocabulary entries survived the filters, when ``sampling`` has any, and
        scores policy, old policy and reference on that same support; "off" scores under the temperature alone.
    """

    prompts: int = 32
    samples_per_prompt: int = 1
    rows: int = 0
    cache_gib: float = 0.0
    cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    sampling: Sampling = Sampling()
    tail: Literal["wait", "abort", "carry", "ahead"] = "wait"
    extra_prompts: int = 0
    budget: int = 0
    max_staleness: int = 0
    dynamic: DynamicSampling = DynamicSampling()
    filters_in_scoring: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        least = {"prompts": 1, "samples_per_prompt": 1, "rows": 0, "extra_prompts": 0, "budget": 0, "max_staleness": 0}
        for field, value in least.items():
            if getattr(self, field) < value:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least {value}")
        self._check_tail()
        if self.cache_gib < 0:
            raise ValueError(f"cache_gib = {self.cache_gib}: must not be negative")
        if self.cache_gib and self.rows:
            raise ValueError(f"cache_gib = {self.cache_gib} and rows = {self.rows}: set one of them")
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0 (greedy) explores nothing: training needs one above 0")

    def _check_tail(self) -> None:
        """Settings that would not be read, and those that another needs."""
        tail, dynamic = self.tail, self.dynamic.enabled
        rules = (
            (
                self.extra_prompts and tail not in ("abort", "carry"),
                f"extra_prompts = {self.extra_prompts}: tail = {tail!r} waits for every prompt; use 'abort' or 'carry'",
            ),
            (tail == "abort" and not self.extra_prompts, "tail = 'abort' needs extra_prompts above 0: nothing is cut"),
            (
                tail == "carry" and not (self.extra_prompts or self.budget),
                "tail = 'carry' needs extra_prompts or budget above 0: nothing is cut",
            ),
            (self.budget and tail != "carry", f"budget = {self.budget}: only tail = 'carry' stops at a budget"),
            (
                tail in ("carry", "ahead") and not self.max_staleness,
                f"tail = {tail!r} needs max_staleness of at least 1",
            ),
            (
                self.max_staleness and not dynamic and tail not in ("carry", "ahead"),
                f"max_staleness = {self.max_staleness}: tail = {tail!r} keeps nothing from step to step; use 'carry', "
                "'ahead' or dynamic.enabled",
            ),
            (
                dynamic and tail != "wait",
                f"dynamic.enabled judges whole groups: it needs tail = 'wait', not {tail!r}",
            ),
            (dynamic and self.samples_per_prompt < 2, "dynamic.enabled compares responses: samples_per_prompt >= 2"),
        )
        faults = [message for broken, message in rules if broken]
        if faults:
            raise ValueError("; ".join(faults))
