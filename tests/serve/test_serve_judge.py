"""A judge over HTTP: its completions are the model's own, whatever else is asked for at the time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from yatt_jax.rewards import RewardSpec, build
from yatt_jax.types import Prompt, Sample

pytestmark = pytest.mark.slow
FLAGS = ("--config.sampling.max_new_tokens=8", "--config.sampling.temperature=1.0", "--config.batch.rows=4")


@pytest.fixture(scope="module")
def judge(serve):
    with serve("judge", *FLAGS) as server:
        yield server


def test_completions_depend_on_prompt_and_seed_alone(judge):
    prompts = ["12", "345", "6"]
    status, found = judge.ask("/generate", {"prompts": prompts, "votes": 3})
    assert status == 200
    assert [len(some) for some in found["completions"]] == [3, 3, 3]
    assert {finish for some in found["finish"] for finish in some} <= {"stop", "length"}
    with ThreadPoolExecutor(3) as threads:
        alone = list(threads.map(lambda p: judge.ask("/generate", {"prompts": [p], "votes": 3})[1], prompts))
    assert [one["completions"][0] for one in alone] == found["completions"]
    assert judge.ask("/generate", {"prompts": prompts, "votes": 3, "seed": 1})[1] != found
    fewer = judge.ask("/generate", {"prompts": prompts, "votes": 2})[1]["completions"]
    assert fewer == [some[:2] for some in found["completions"]]


def test_greedy_completions_are_those_of_transformers(serve):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with serve("judge", "--config.sampling.max_new_tokens=8", "--config.sampling.temperature=0.0") as server:
        (found,) = server.ask("/generate", {"prompts": ["1234"]})[1]["completions"]
    folder = serve.folder / "judge"
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = torch.tensor([tokenizer("1234", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        written = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=8)
    assert found == [tokenizer.decode(written[0, row.shape[1] :], skip_special_tokens=True)]


@pytest.mark.parametrize(
    ("posted", "message"),
    [
        ({}, '"prompts": expected a list'),
        ({"prompts": ["1"], "votes": 0}, '"votes" = 0'),
        ({"prompts": ["1"], "votes": 2000}, "2000 texts in a request"),
        ({"prompts": ["1"], "seed": "a"}, '"seed"'),
        ({"prompts": ["1" * 65]}, "text 0 has 65 tokens"),
        ({"prompts": [[]]}, "prompts[0]: expected a list of turns"),
        ({"prompts": [[{"role": "user", "content": "1"}]]}, "chat template"),
    ],
)
def test_bad_requests(judge, posted, message):
    status, found = judge.ask("/generate", posted)
    assert (status, message in found["error"]) == (400, True), found


def test_the_reward_and_the_server(judge):
    """A model that knows nothing gives verdicts of one digit now and then: the rest are counted as malformed."""
    kwargs = {
        "urls": (judge.url,),
        "template": "{question} {completion}",
        "pattern": r"^(\d)$",
        "votes": 4,
        "retries": 3,
    }
    scorer = build({"judge": RewardSpec("yatt_jax.rewards.judge:Judge", kwargs=kwargs)})
    samples = [Sample(Prompt([], f"{i}", [1], {}, "p", i), f"{i}", [1], "stop", i, i) for i in range(6)]
    first, second = scorer(samples), scorer(samples)
    scorer.close()
    assert first.total.tolist() == pytest.approx(second.total.tolist(), nan_ok=True)
    assert first.counts["judge/verdicts"] == second.counts["judge/verdicts"] >= 24
    assert first.counts["judge/malformed"] > 0
