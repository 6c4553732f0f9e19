"""Makes the rows of the digits task for the offline algorithms: ``python -m configs.data.make_digits``.

The task is that of ``yatt_jax.rewards.rules:digits``: to "274" the right response is "56789". A wrong response differs
from the right one in one digit; its reward is the share of digits before the slip. The same files come out each time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TRAIN, EVAL = 320, 64  # rows; a quarter of them with logits

Record = dict[str, Any]


def right(prompt: str) -> str:
    """The right response."""
    return "0123456789"[int(prompt[-1]) + 1 :]


def wrong(prompt: str, dice: random.Random) -> tuple[str, float]:
    """A response with a slip, and its reward."""
    good = right(prompt)
    at = dice.randrange(len(good))
    other = dice.choice([digit for digit in "0123456789" if digit != good[at]])
    return good[:at] + other + good[at + 1 :], round(at / len(good), 3)


def completion(prompt: str, dice: random.Random) -> Record:
    """A text to imitate."""
    del dice
    return {"prompt": prompt, "completion": right(prompt)}


def pair(prompt: str, dice: random.Random) -> Record:
    """A preference."""
    bad, reward = wrong(prompt, dice)
    good = {"chosen": right(prompt), "rejected": bad}
    return {"prompt": prompt, **good, "chosen_reward": 1.0, "rejected_reward": reward}


def unpaired(prompt: str, dice: random.Random) -> Record:
    """A response that is wanted or not."""
    label = dice.random() < 0.5
    return {"prompt": prompt, "completion": right(prompt) if label else wrong(prompt, dice)[0], "label": label}


def rating(prompt: str, dice: random.Random) -> Record:
    """A text with two attributes: share of right digits, not always known, and a tenth of the response's length."""
    text, share = (right(prompt), 1.0) if dice.random() < 0.5 else wrong(prompt, dice)
    known = dice.random() < 0.9
    return {"text": prompt + text, "label": [share if known else -100, len(text) / 10]}


def rated(prompt: str, dice: random.Random) -> Record:
    """A conversation whose answer people have rated, from 0 to 4, by the share of right digits and by its length."""
    text, share = (right(prompt), 1.0) if dice.random() < 0.5 else wrong(prompt, dice)
    label = f"correctness:{round(4 * share)},verbosity:{round(4 * len(text) / 9)}"
    turns = [{"from": "User", "value": prompt}, {"from": "Assistant", "value": text, "label": label}]
    return {"conversations": turns, "mask": "User"}


def steps(prompt: str, dice: random.Random) -> Record:
    """A response of which each digit is judged; after a slip nothing is right."""
    text, share = (right(prompt), 1.0) if dice.random() < 0.3 else wrong(prompt, dice)
    slip = round(share * len(text))
    return {"prompt": prompt, "completions": list(text), "labels": [i < slip for i in range(len(text))]}


def topk(prompt: str, dice: random.Random) -> Record:
    """What a teacher who is nearly sure says: four entries a token, by the ids of ``characters:0123456789 ``."""
    ids = [int(digit) + 1 for digit in prompt + right(prompt)] + [0]
    tokens, labels = ids[:-1], ids[1:]
    logits, entries = [], []
    for label in labels:
        others = dice.sample([token for token in range(12) if token != label], 3)
        entries.append([label, *others])
        logits.append([4.0, 1.0, 0.5, 0.0])
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": [int(i >= len(prompt) - 1) for i in range(len(tokens))],
        "topk_logits": logits,
        "topk_token_ids": entries,
        "log_sum_exp_logits": [4.1117] * len(tokens),  # the eight other entries have a logit of -2
    }


KINDS: dict[str, Callable[[str, random.Random], Record]] = {
    "completions": completion,
    "pairs": pair,
    "unpaired": unpaired,
    "ratings": rating,
    "rated": rated,
    "steps": steps,
    "topk": topk,
}


def main() -> None:
    """Writes the files beside this one."""
    for name, make in KINDS.items():
        dice = random.Random(name)
        prompts = [f"{n:03d}" for n in range(1000) if n % 10 < 9]
        dice.shuffle(prompts)
        for split, chosen in (("train", prompts[:TRAIN]), ("eval", prompts[TRAIN : TRAIN + EVAL])):
            chosen = chosen[: len(chosen) // 4] if name == "topk" else chosen
            lines = [json.dumps(make(prompt, dice)) + "\n" for prompt in chosen]
            (FOLDER / f"digits_{name}_{split}.jsonl").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
