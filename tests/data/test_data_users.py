"""Files as users of NeMo-Aligner and of TRL have them, unchanged, up to the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AddedToken

from yatt_jax.data.config import SourceConfig
from yatt_jax.data.documents import Encoder
from yatt_jax.data.formats import FORMATS
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.prompts import DataConfig, PromptSource
from yatt_jax.data.tokenizer import character_tokenizer
from yatt_jax.types import LabelRows, PairRows, StepRows, TextRows, TopKRows, UnpairedRows

NEMO_PROMPT = "<extra_id_0>System\n\n<extra_id_1>User\nWhat is 2+2?\n<extra_id_1>Assistant\n"
NEMO_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:!?-\n<>_+'"
NEMO_CHAT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "User", "value": "Hi", "label": None},
        {"from": "Assistant", "value": "Hello", "label": "quality:4,toxicity:0,helpfulness:3"},
    ],
    "mask": "User",
    "type": "VALUE_TO_TEXT",
}
NEMO_TOPK = {
    "tokens": [5, 6, 7, 8],
    "labels": [6, 7, 8, 0],
    "loss_mask": [0, 1, 1, 0],
    "topk_logits": [[9.0, 1.0], [2.0, 1.0], [4.0, 3.0], [0.0, 0.0]],
    "topk_token_ids": [[1, 2], [7, 3], [8, 5], [0, 0]],
    "log_sum_exp_logits": [9.5, 2.5, 4.5, 1.0],
}
SKY = [{"role": "user", "content": "What color is the sky?"}]
BLUE, GREEN = ([{"role": "assistant", "content": f"It is {color}."}] for color in ("blue", "green"))
SKY_TEXT = "[u]What color is the sky?<end>[a]"

# Kind of rows, whether there is a chat template, records, and each document with what is trained in braces.
OFFLINE: dict[str, tuple[Any, bool, list[dict[str, Any]], list[str]]] = {
    "nemo sft": (TextRows, False, [{"input": "Say it. ", "output": "It.", "category": "qa"}], ["Say it. {It.<eos>}"]),
    "nemo chat": (
        TextRows,
        True,
        [NEMO_CHAT],
        ["[s]Be brief.<end>[u]Hi<end>[a]quality:4,toxicity:0,helpfulness:3\n{Hello<end>}"],
    ),
    "nemo reward model": (
        PairRows,
        False,
        [{"text": NEMO_PROMPT + "4\n<extra_id_1>"}, {"text": NEMO_PROMPT + "5\n<extra_id_1>"}],
        [NEMO_PROMPT[:-1] + "{\n4\n<extra_id_1><eos>}", NEMO_PROMPT[:-1] + "{\n5\n<extra_id_1><eos>}"],
    ),
    "nemo dpo": (
        PairRows,
        False,
        [
            {
                "prompt": NEMO_PROMPT,
                "chosen_response": "4\n<extra_id_1>",
                "rejected_response": "5\n<extra_id_1>",
                "chosen_reward": 4,
                "rejected_reward": 2.5,
            }
        ],
        [NEMO_PROMPT + "{4\n<extra_id_1><eos>}", NEMO_PROMPT + "{5\n<extra_id_1><eos>}"],
    ),
    "nemo kto": (
        UnpairedRows,
        False,
        [{"prompt": NEMO_PROMPT, "response": "4\n<extra_id_1>", "preference": "chosen"}],
        [NEMO_PROMPT + "{4\n<extra_id_1><eos>}"],
    ),
    "nemo regression": (
        LabelRows,
        False,
        [{"text": "Hi.", "label": [4, 0, 1, 1, 3, 3, 4, 1, -100]}],
        ["H{i.<eos>}"],
    ),
    "nemo preference strength": (
        PairRows,
        False,
        [{"text": "A: x y", "label": [2]}, {"text": "A: x z", "label": [2]}],
        ["A: x{ z<eos>}", "A: x{ y<eos>}"],
    ),
    "nemo steerlm labels": (LabelRows, True, [NEMO_CHAT], ["[s]Be brief.<end>[u]Hi<end>[a]Hello<end>"]),
    "nemo distillation": (TopKRows, False, [NEMO_TOPK], ["ef{gh}"]),
    "trl language modeling": (TextRows, False, [{"text": "The sky is blue."}], ["T{he sky is blue.<eos>}"]),
    "trl language modeling, conversations": (
        TextRows,
        True,
        [{"messages": SKY + BLUE}],
        [SKY_TEXT + "{It is blue.<end>}"],
    ),
    "trl prompt and completion": (
        TextRows,
        False,
        [{"prompt": "The sky is", "completion": " blue."}],
        ["The sky is{ blue.<eos>}"],
    ),
    "trl prompt and completion, conversations": (
        TextRows,
        True,
        [{"prompt": SKY, "completion": BLUE}],
        [SKY_TEXT + "{It is blue.<end>}"],
    ),
    "trl preference": (
        PairRows,
        False,
        [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}],
        ["The sky is{ blue.<eos>}", "The sky is{ green.<eos>}"],
    ),
    "trl preference, conversations": (
        PairRows,
        True,
        [{"prompt": SKY, "chosen": BLUE, "rejected": GREEN}],
        [SKY_TEXT + "{It is blue.<end>}", SKY_TEXT + "{It is green.<end>}"],
    ),
    "trl preference, prompt within": (
        PairRows,
        False,
        [{"chosen": "The sky is blue.", "rejected": "The sky is green."}],
        ["The sky is{ blue.<eos>}", "The sky is{ green.<eos>}"],
    ),
    "trl preference, conversations, prompt within": (
        PairRows,
        True,
        [{"chosen": SKY + BLUE, "rejected": SKY + GREEN, "margin": 0.5}],
        [SKY_TEXT + "{It is blue.<end>}", SKY_TEXT + "{It is green.<end>}"],
    ),
    "trl unpaired": (
        UnpairedRows,
        False,
        [{"prompt": "The sky is", "completion": " blue.", "label": True}],
        ["The sky is{ blue.<eos>}"],
    ),
    "trl unpaired, conversations": (
        UnpairedRows,
        True,
        [{"prompt": SKY, "completion": GREEN, "label": False}],
        [SKY_TEXT + "{It is green.<end>}"],
    ),
    "trl stepwise supervision": (
        StepRows,
        False,
        [{"prompt": "Which is larger?", "completions": [" 9.11.", " No."], "labels": [False, True]}],
        ["Which is larger?{ 9.11.\n No.<eos>}"],
    ),
    "sharegpt": (
        TextRows,
        True,
        [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": "x_0"}],
        ["[u]Hi<end>[a]{Hello<end>}"],
    ),
}
PROMPTS: dict[str, tuple[bool, dict[str, Any], str]] = {
    "nemo": (False, {"text": NEMO_PROMPT}, NEMO_PROMPT),
    "trl": (False, {"prompt": "The sky is", "ground_truth": "blue"}, "The sky is"),
    "trl, conversations": (True, {"prompt": SKY, "ground_truth": "blue"}, SKY_TEXT),
    "messages": (True, {"messages": SKY, "level": 3}, SKY_TEXT),
}


@pytest.fixture
def tokenizer(chat_tokenizer) -> Any:
    """Characters, with the template of ``chat_tokenizer`` or without."""

    def get(template: bool) -> Any:
        made = character_tokenizer(NEMO_ALPHABET)
        for token in ("<end>", "[u]", "[a]", "[s]"):
            made.add_tokens(AddedToken(token, special=True, normalized=False))
        made.chat_template = chat_tokenizer.chat_template if template else None
        return made

    return get


def marked(tokens: Sequence[int], learned: Sequence[bool], tokenizer: Any) -> str:
    """A text with what is trained in braces."""
    text, inside = "", False
    for token, now in zip(tokens, learned, strict=True):
        text += ("{" if now and not inside else "}" if inside and not now else "") + tokenizer.decode(token)
        inside = now
    return text + "}" * inside


@pytest.mark.parametrize("name", OFFLINE)
def test_rows(write, tokenizer, name: str) -> None:
    kind, template, records, expected = OFFLINE[name]
    made = tokenizer(template)
    encoder = Encoder(OfflineConfig(), made, kind)
    table = encoder.open(write("theirs.jsonl", records))
    (outcome,) = encoder.read([(0, table[0])])
    assert outcome.row is not None, outcome.message
    found = [marked(d.tokens.tolist(), d.mask.tolist(), made) for d in outcome.row.documents]
    assert found == expected


def test_every_format_is_among_them() -> None:
    """Each was read by the format that its name stands for, and none is left."""
    found = set()
    for kind, _, records, _ in OFFLINE.values():
        fits = [f.name for f in FORMATS[kind] if set(f.fields) <= records[0].keys()]
        found.add((kind, fits[0]))
    assert found == {(kind, format.name) for kind, formats in FORMATS.items() for format in formats}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(write, tokenizer, name: str) -> None:
    template, record, expected = PROMPTS[name]
    config = DataConfig(train=(SourceConfig(write("theirs.jsonl", [record] * 2)),), max_prompt_tokens=200)
    source = PromptSource(config, tokenizer(template), prompts_per_step=1, seed=0, process_index=0, process_count=1)
    (prompt,) = next(source)
    assert prompt.text == expected
    further = record.keys() - {"text", "prompt", "messages"}
    assert {key: prompt.columns[key] for key in further} == {key: record[key] for key in further}
