"""SPIN on the digits task of ``ppo_digits``: right responses are given, and preferred to the policy's own.

Command:   python -m yatt_jax.main --config=configs/spin_digits.py --workdir=runs/spin_digits
Hardware:  2 CPU cores, 1 GB of memory.
Task:      the reward is only reported; the rows are those of ``configs/sft.py``.
Variants:  ``:tiny`` runs three steps, in two iterations.
Own data:  --config.data.train=FILE; every format for texts is in docs/usage.md. The last answer of each is compared
           with one that the policy of the iteration's start writes.
"""

from ml_collections import ConfigDict

from configs.tasks.digits import digits


def get_config(variant: str = "") -> ConfigDict:
    """The config; ``variant`` is "" or "tiny"."""
    if variant == "shuffled":  # no reward trains anything here
        raise ValueError("spin_digits has no variant 'shuffled'; there is 'tiny'")
    config = digits("spin", variant)
    config.data.train = ("configs/data/digits_completions_train.jsonl",)
    config.data.eval = ("configs/data/digits_completions_eval.jsonl",)
    config.rollout.prompts = 16 if variant == "tiny" else 32
    config.hyper.iteration_steps = 2 if variant == "tiny" else 20
    config.hyper.minibatches = 1
    config.steps = 3 if variant == "tiny" else 100
    return config.lock()
