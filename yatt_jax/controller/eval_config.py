"""When a run is evaluated, and what is measured then."""

from __future__ import annotations

import dataclasses

from yatt_jax.rewards.spec import is_path


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation.

    Attributes:
      every: steps between evaluations; the start and the end are always evaluated. 0: never.
    """

    every: int = 10

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{field.name} = {value}: must not be negative")


@dataclasses.dataclass(frozen=True)
class PromptsEvalConfig(EvalConfig):
    """Held-out evaluation on what the actor writes.

    Attributes:
      prompts: how many held-out prompts, the first ones; 0: all.
      samples: responses to each; with several, pass@k is measured.
      temperature: of the evaluation's samples (other sampling settings are the rollout's); 0: greedy.
      right_from: the least reward of a right response, for pass@k and maj@k.
      vote: import path of a function that says what each sample answers, such as "yatt_jax.rewards.votes:number"; with
        it maj@k is measured, of the answer that most samples give.
      win_rate: measure how often the actor's response scores higher than the frozen reference's to the same prompt.
    """

    prompts: int = 64
    samples: int = 1
    temperature: float = 1.0
    right_from: float = 1.0
    vote: str = ""
    win_rate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise ValueError(f"samples = {self.samples}: must be at least 1")
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"samples = {self.samples} with temperature = 0 (greedy): all of them would be the same")
        if self.vote and not is_path(self.vote):
            raise ValueError(f"vote = {self.vote!r}: expected an import path, as 'yatt_jax.rewards.votes:number'")
        for field, value in (("vote", self.vote), ("right_from", self.right_from != 1)):
            if value and self.samples == 1:
                raise ValueError(f"{field} = {getattr(self, field)!r}: needs samples above 1, it judges several")


@dataclasses.dataclass(frozen=True)
class RowsEvalConfig(EvalConfig):
    """Held-out evaluation on given rows.

    Attributes:
      rows: how many held-out rows, the first ones; 0: all.
    """

    rows: int = 0
