"""A language model that answers prompts in batches, on all devices of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.data.config import DataConfig
from yatt_jax.data.conversation import Turn
from yatt_jax.data.reader import PromptReader
from yatt_jax.errors import InputError
from yatt_jax.io import hf
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.rollout.engine import Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Prompt, Sample


def find_model(path: str | Path) -> Path:
    """The model folder meant by a run directory, a model folder or a GGUF file.

    Raises:
      InputError: nothing there to load, with what was looked for.
    """
    given = Path(path)
    for candidate in (given, given / "export"):
        if candidate.suffix == ".gguf" and candidate.is_file():
            return candidate
        if (candidate / "config.json").exists() and any(candidate.glob("*.safetensors")):
            return candidate
    raise InputError(
        f"{given}: no model here; expected a folder with config.json and safetensors, a run directory with export/, "
        "or a .gguf file"
    )


def identity(path: Path) -> dict[str, Any]:
    """What tells a model from one that takes its place later: its path, and size and time of its weights."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {"path": str(path), "weights": [[file.stat().st_size, file.stat().st_mtime_ns] for file in files]}


class Speaker:
    """A language model with its tokenizer and engine.

    Args:
      path: see ``find_model``.
      rows: answers that are sampled at a time.
      max_prompt_tokens: longest prompt; less where the model has not so many positions.
      sampling: how it answers; the model's own stop tokens are added.
      data: how prompts are rendered; its lengths are replaced.
      compute_dtype: of activations.

    Attributes:
      path: of the model.
      tokenizer: of the model.
      reader: reads records as prompts.

    Raises:
      InputError: a model or template that cannot be read, or that has no room for a prompt.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rows: int,
        max_prompt_tokens: int,
        sampling: Sampling,
        data: DataConfig | None = None,
        compute_dtype: str = "float32",
    ) -> None:
        self.path = find_model(path)
        self.tokenizer = tokenizers.load_tokenizer(str(self.path))
        limit = hf.read_folder(self.path).hf_config.get("max_position_embeddings") or 0
        room = limit - sampling.max_new_tokens if limit else max_prompt_tokens
        if room < 1:
            raise InputError(
                f"{self.path}: answers of {sampling.max_new_tokens} tokens leave no room for a prompt in the model's "
                f"{limit} positions"
            )
        self._limit = min(max_prompt_tokens, room)
        config = dataclasses.replace(data or DataConfig(), max_prompt_tokens=self._limit)
        self.reader = PromptReader(config, self.tokenizer)
        self._system, self._kwargs = config.system, dict(config.template_kwargs)
        stops = tokenizers.stop_token_ids(self.tokenizer, self.path if self.path.is_dir() else None)
        self.sampling = dataclasses.replace(sampling, stop_token_ids=stops)
        _, partition = make_partitions(Split(), Split())
        model, self._params = hf.load_model(self.path, "lm", partition, compute_dtype=compute_dtype)
        self._engine = Engine(
            model,
            self.tokenizer,
            partition,
            rows=rows,
            max_prompt_tokens=self._limit,
            max_new_tokens=sampling.max_new_tokens,
        )

    def ask(self, turns: Sequence[Turn], begin: str = "", *, source: str = "conversation", index: int = 0) -> Prompt:
        """A conversation as a prompt.

        Args:
          turns: the last one is the user's.
          begin: what the answer begins with, not to be sampled.
          source: "file:line", for messages.
          index: number of the record.
        """
        text = tokenizers.render(
            self.tokenizer, turns, system=self._system, template_kwargs=self._kwargs, source=source
        )
        return self.begun(Prompt(list(turns), text, [], {}, source, index), begin)

    def begun(self, prompt: Prompt, begin: str) -> Prompt:
        """A prompt whose answer begins with a text that is not to be sampled.

        Raises:
          InputError: the tokenizer cannot encode it.
        """
        text = prompt.text + begin
        try:
            (ids,) = tokenizers.encode(self.tokenizer, [text])
        except Exception as error:  # the tokenizers library raises Exception itself
            raise InputError(
                f"{prompt.source}: the tokenizer failed: {error}; does its vocabulary have every character of {text!r}?"
            ) from error
        return dataclasses.replace(prompt, text=text, tokens=ids)

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt is no longer than it may be."""
        return 0 < len(prompt.tokens) <= self._limit

    def answer(
        self, prompts: Sequence[Prompt], ids: Sequence[int], *, seed: int, sampling: Sampling | None = None
    ) -> list[Sample]:
        """An answer to each prompt. It depends on model, prompt, sampling, seed and number alone.

        Args:
          prompts: that fit.
          ids: number of each answer, unique among all that are sampled with this seed.
          seed: of the random keys.
          sampling: in place of the speaker's; no longer answers.
        """
        if not prompts:
            return []
        groups = list(range(len(prompts)))
        return self._engine.generate(
            self._params, prompts, sampling or self.sampling, seed=seed, sample_ids=ids, groups=groups, version=0
        )[1]
