"""The digits task of ``yatt_jax.rewards.rules:digits`` as rows, for any offline algorithm.

The rows are in ``configs/data/digits_*.jsonl``; ``configs/data/make_digits.py`` makes them.
"""

from typing import Any

from yatt_jax.config import default_config

VARIANTS = ("", "small", "tiny")


def digits_rows(algo: str, rows: str, variant: str) -> Any:
    """A config of the task, still open, for a config file to finish.

    Args:
      algo: the algorithm.
      rows: which of the files in ``configs/data``: "completions", "pairs", "unpaired", "ratings" or "steps".
      variant: "" trains SmolLM2-135M-Instruct; "small" a model from scratch of some 100,000 parameters on one character
        a token; "tiny" is three steps of that.

    Raises:
      ValueError: another variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"{algo} has no variant {variant!r}; there are {[name for name in VARIANTS if name]}")
    config = default_config(algo)
    config.data.train = (f"configs/data/digits_{rows}_train.jsonl",)
    config.data.eval = (f"configs/data/digits_{rows}_eval.jsonl",)
    config.data.step_separator = " "
    config.data.max_tokens = 64
    config.model.remat = "none"
    config.report.tensorboard = False
    if variant:
        config.model.tokenizer = "characters:0123456789 "
        config.model.init.mlp = 256
        config.model.init.tied = False
        config.data.max_tokens = 32
        config.optimizer.lr = 2e-3
        config.train.micro_rows = 0
        config.steps = 3 if variant == "tiny" else 80
    else:
        config.model.path = "models/SmolLM2-135M-Instruct"
        # Without the system message that the model's own template adds: every token costs time on a CPU.
        config.data.chat_template = "configs/data/chatml.jinja"
        config.optimizer.lr = 1e-5
        config.optimizer.warmup_steps = 4
        config.steps = 40
    return config
