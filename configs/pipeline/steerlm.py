"""SteerLM: an attribute model, a data set rated by it, fine-tuning conditioned on the ratings, and bootstrapping.

Command:   python -m tools.pipeline configs/pipeline/steerlm.py --workdir=runs/steerlm
One stage: python -m yatt_jax.main --config=configs/pipeline/steerlm.py:attributes --workdir=runs/steerlm/attributes
Hardware:  2 CPU cores, 8 GB of memory.
Task:      the digits task. People have rated 320 answers by correctness and verbosity; of 320 others, half of them
           wrong, nothing is known. The model learns to write answers of a correctness that is asked for:
           python -m tools.chat runs/steerlm/bootstrap --attributes correctness:4
Variants:  ``:small`` trains models from scratch, ``:tiny`` runs three steps of that; the default SmolLM2-135M-Instruct.
Own data:  rated conversations for ``attributes``, any conversations for ``annotate``, prompts for ``respond``.
Source:    Dong et al. 2023, "SteerLM: attribute conditioned SFT as an (user-steerable) alternative to RLHF".
"""

from typing import Any

from ml_collections import ConfigDict

from configs.tasks.digits_rows import digits_rows
from configs.tasks.stages import Stages, stage_config
from yatt_jax.data.attributes import ATTRIBUTES

WANTED = "correctness:4"


def get_stages(folder: str, variant: str = "") -> Stages:
    """The stages in order, for runs in ``folder``; ``variant`` is "", "small" or "tiny"."""
    attributes = _open("reward_regression", variant)
    attributes.data.train = ("configs/data/digits_rated_train.jsonl",)
    attributes.data.eval = ("configs/data/digits_rated_eval.jsonl",)
    attributes.hyper.attributes = len(ATTRIBUTES)  # most are rated nowhere, and not trained

    rate = [f"{folder}/attributes", "--attributes=correctness", "--max_tokens=64"]
    annotate = ["tools.annotate", *rate, "--data=configs/data/digits_unpaired_train.jsonl"]

    sft = _open("sft", variant)
    sft.data.train = (f"{folder}/annotate/rows.jsonl",)

    respond = ["tools.respond", f"{folder}/sft", f"--attributes={WANTED}", "--samples=2", "--max_new_tokens=16"]
    respond += ["--max_prompt_tokens=32", "--data=configs/data/digits_train.jsonl"]

    bootstrap = _open("sft", variant)
    bootstrap.data.train = (f"{folder}/annotate/rows.jsonl", f"{folder}/rate/rows.jsonl")
    bootstrap.model.path = f"{folder}/sft/export"
    bootstrap.model.tokenizer = ""

    for config in (sft, bootstrap):
        config.data.eval = ()
        config.data.holdout = 32
    if variant == "small":
        attributes.steps, sft.steps, bootstrap.steps = 320, 160, 80
    return {
        "attributes": attributes,
        "annotate": [*annotate, f"--out={folder}/annotate/rows.jsonl"],
        "sft": sft,
        "respond": [*respond, f"--out={folder}/respond/rows.jsonl"],
        "rate": ["tools.annotate", *rate, f"--data={folder}/respond/rows.jsonl", f"--out={folder}/rate/rows.jsonl"],
        "bootstrap": bootstrap,
    }


def get_config(variant: str = "") -> ConfigDict:
    """The config of a stage, as ``STAGE[,VARIANT][,in=FOLDER]``; by default stages lie in ``runs/steerlm``."""
    return stage_config(get_stages, "runs/steerlm", variant)


def _open(algo: str, variant: str) -> Any:
    """A config of the digits task whose model knows the letters of labels."""
    config = digits_rows(algo, "completions", variant)
    config.data.max_tokens = 64
    if variant:
        config.model.tokenizer = "characters:0123456789 :,\nbceinorstvy"
        config.data.chat_template = "configs/data/plain.jinja"
    return config
