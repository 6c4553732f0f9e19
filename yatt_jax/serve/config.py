"""What a server is told."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any, Literal

from ml_collections import ConfigDict

from yatt_jax.parallel.partition import Split
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.typed import to_dict

Role = Literal["reward", "critic", "judge"]


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """How requests are put together.

    Attributes:
      rows: most texts of a batch.
      delay_ms: how long the first text that waits is kept waiting for others.
      waiting: texts that may wait; further requests are answered with 429.
    """

    rows: int = 32
    delay_ms: float = 5.0
    waiting: int = 4096

    def __post_init__(self) -> None:
        for name in ("rows", "waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 0 <= self.delay_ms < 60_000:
            raise ValueError(f"delay_ms = {self.delay_ms}: must be from 0 to below 60000")


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    """What a request may ask for, and how long it may take.

    Attributes:
      body_mb: of a request, in 10^6 bytes.
      texts: of a request; of a judge, prompts times votes.
      tokens: of a text, its response included; of a judge's prompt.
      overlong: "error" refuses longer texts with 400; "cut" drops their beginning, and ``exceeded`` tells which.
      body_s: seconds until the body of a request has come.
      request_s: seconds until a request is answered; then 503.
      drain_s: seconds that requests under way are given when the server is told to stop.
    """

    body_mb: float = 16.0
    texts: int = 1024
    tokens: int = 1024
    overlong: Literal["error", "cut"] = "error"
    body_s: float = 30.0
    request_s: float = 120.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "overlong" and not value > 0:
                raise ValueError(f"{field.name} = {value}: must be above 0")


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A server.

    Attributes:
      path: folder in Hugging Face format, GGUF file, or run directory, ``RUN_DIR[@STEP]``.
      tokenizer: folder, GGUF file, or ``characters:ALPHABET``; empty: the model's own.
      chat_template: file with a jinja template, in place of the tokenizer's; empty: that.
      dtype: of the parameters (of a run: as it trained them).
      compute_dtype: of activations and matrix products.
      parallel: how the devices of the machine are split.
      host: address to listen at. Another than loopback needs a token.
      token_env: environment variable that holds the bearer token that clients must show; empty: none.
      sampling: of a judge.
      seed: of a judge: a verdict depends on it, the prompt, and the numbers of request and vote alone.
      compilation_cache: folder where compiled programs are kept between runs; empty: none.
    """

    path: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    parallel: Split = Split()
    host: str = "127.0.0.1"
    token_env: str = ""
    batch: BatchConfig = BatchConfig()
    limits: LimitsConfig = LimitsConfig()
    sampling: Sampling = Sampling(temperature=0.7, max_new_tokens=256)
    seed: int = 0
    compilation_cache: str = "~/.cache/yatt_jax"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a model folder, a GGUF file or a run directory")
        if not self.token_env and not _loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines: set token_env to the name of an environment "
                "variable that holds a token"
            )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_config() -> Any:
    """Every key with its default, as an unlocked ConfigDict for config files to fill in."""
    return ConfigDict({f.name: to_dict(f.default) for f in dataclasses.fields(ServeConfig)})
