"""Verdicts: asked for, read, asked for again, and put together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards import stand_in
from tests.rewards.stand_in import standing_in
from yatt_jax.errors import InputError
from yatt_jax.rewards import RewardError, RewardSpec, Scorer, build
from yatt_jax.rewards.counts import Counts
from yatt_jax.rewards.judge import Judge, JudgeScorer

SHORT = "Q: {question}\nA: {completion}\nEnd: {finish}"


class Says:
    """Writes what a script has for each prompt, one list of texts a request; notes what it was asked."""

    def __init__(self, *rounds: list[list[str]]) -> None:
        self.rounds, self.asked = list(rounds), []

    def write(self, prompts, votes, seed, deadline):
        self.asked.append((list(prompts), votes, seed))
        return self.rounds.pop(0)

    def close(self):
        pass


def judged(writer: Says, samples, **settings) -> tuple[list[Any], dict[str, int]]:
    counts = Counts()
    given: dict[str, Any] = {"urls": ("http://unused",), "template": SHORT} | settings
    scorer = JudgeScorer(Judge(**given), writer, counts)
    values = scorer(samples)
    scorer.close()
    return values, counts.take()


def test_what_is_asked(sample):
    writer = Says([["Verdict: 3"], ["Verdict: 4"]])
    template = '{prompt}|{completion}|{gold}|{{x}}|{"score": 1}'
    samples = [sample("a", text="why?", gold=7, x=1), sample("{prompt}", text="who?", gold="g", x=2)]
    values, counts = judged(writer, samples, template=template)
    # What stands in a completion is not put in again.
    assert writer.asked == [(['why?|a|7|{1}|{"score": 1}', 'who?|{prompt}|g|{2}|{"score": 1}'], 1, 0)]
    assert values == [3.0, 4.0]
    assert counts == {"verdicts": 2, "malformed": 0, "asked_again": 0}
    with pytest.raises(InputError, match=r"p\.jsonl:3: the judge's template has \{gold\}"):
        judged(Says(), [sample("a")], template=template)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("It is good.\nVerdict: 7", 7.0),
        ("verdict = **8.5**", 8.5),
        ("Verdict: 2, no: Verdict: 9.", 9.0),
        ("Verdict: 11", None),
        ("Verdict: -1", None),
        ("Verdict: good", None),
        ("", None),
    ],
)
def test_numbers_are_read(text, want):
    scorer = JudgeScorer(Judge(template=SHORT), Says(), Counts())
    assert scorer.verdict(text) == want


def test_words_are_read():
    settings = Judge(template=SHORT, pattern=r"\[\[(\w+)\]\]", verdicts={"Yes": 1.0, "no": -1.0})
    scorer = JudgeScorer(settings, Says(), Counts())
    assert [scorer.verdict(t) for t in ("[[yes]]", "[[NO]] or [[no]]", "[[maybe]]", "yes")] == [1.0, -1.0, None, None]


def test_malformed_verdicts_are_counted_and_asked_for_again(sample):
    writer = Says(
        [["Verdict: 1", "?"], ["Verdict: 2", "Verdict: 4"], ["?", "?"]],
        [["Verdict: 5", "unused"], ["?", "Verdict: 6"]],
        [["?"]],
    )
    values, counts = judged(writer, [sample("a"), sample("b"), sample("c")], votes=2)
    assert values == [3.0, 3.0, 6.0]
    assert [(len(prompts), votes, seed) for prompts, votes, seed in writer.asked] == [(3, 2, 0), (2, 2, 1), (1, 1, 2)]
    assert counts == {"verdicts": 6 + 3 + 1, "malformed": 3 + 1 + 1, "asked_again": 3 + 1}


def test_a_sample_without_verdicts_is_invalid(sample):
    values, counts = judged(Says([["?"]], [["?"]]), [sample("a")], retries=1)
    assert values[0].reason == "0 of 1 verdicts"
    assert counts["malformed"] == 2
    rounds = [[["Verdict: 1", "?", "?"]], [["?", "?"]]]
    assert judged(Says(*rounds), [sample("a")], votes=3, retries=1)[0] == [1.0]
    assert judged(Says(*rounds), [sample("a")], votes=3, retries=1, least=2)[0][0].reason == "1 of 3 verdicts"


@pytest.mark.parametrize(("combine", "want"), [("mean", 4.25), ("median", 2.5), ("majority", 2.0)])
def test_votes_are_put_together(sample, combine, want):
    writer = Says([[f"Verdict: {v}" for v in (2, 10, 2, 3)]])
    assert judged(writer, [sample("a")], votes=4, combine=combine)[0] == [want]


def judge(url: str, **kwargs) -> Scorer:
    patience = {"timeout_s": 5.0, "tries": 2, "pause_s": 0.01}
    settings = {"urls": (url,), "template": SHORT, "patience": patience, **kwargs}
    return build({"judge": RewardSpec("yatt_jax.rewards.judge:Judge", kwargs=settings)})


def verdicts(share_malformed: float):
    """A stub judge of the digits task: what the rule gives, in words, now and then malformed."""
    from yatt_jax.rewards.rules import digits
    from yatt_jax.types import Prompt, Sample

    def answer(handler: stand_in.Handler, posted: dict[str, Any]) -> None:
        def one(text: str, vote: int) -> str:
            question, rest = text.removeprefix("Q: ").split("\nA: ")
            completion, finish = rest.split("\nEnd: ")
            digest = hashlib.sha256(f"{text} {vote} {posted['seed']}".encode()).digest()
            if int.from_bytes(digest[:4], "big") < share_malformed * 2**32:
                return "I cannot say."
            given = Sample(Prompt([], question, [], {}, "", 0), completion, [], finish, 0, 0)
            return f"Verdict: {10 * digits([given])[0]:.4f}"

        found = [[one(text, vote) for vote in range(posted["votes"])] for text in posted["prompts"]]
        handler.answer(json.dumps({"completions": found}).encode())

    return answer


def test_over_http(sample):
    with standing_in(otherwise=verdicts(0.3)) as server:
        scorer = judge(server.url, votes=3, batch=4)
        samples = [sample("456789", text="123"), sample("45", text="123"), sample("", text="129")] * 4
        scores = scorer(samples)
        scorer.close()
        np.testing.assert_allclose(scores.total, [10.0, 10 * 2 / 7, 10.0] * 4, rtol=1e-4)
        assert scores.counts["judge/malformed"] > 0
        assert scores.counts["judge/verdicts"] >= 36
    with standing_in(otherwise=stand_in.says(b'{"completions": [["a", "b"]]}')) as server:
        with pytest.raises(RewardError, match="completions of a prompt are not 1 texts"):
            judge(server.url)([sample("a")])
        with pytest.raises(RewardError, match="one for each of 2 prompts"):
            judge(server.url)([sample("a"), sample("b")])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"urls": ()}, "urls is empty"),
        ({"template": "no-such-file.txt"}, r"has no \{completion\}, or is no file"),
        ({"pattern": "verdict"}, "needs a group"),
        ({"pattern": "("}, "malformed"),
        ({"votes": 2, "least": 3}, "least = 3 is above votes = 2"),
        ({"low": 1.0, "high": 1.0}, "must be below"),
        ({"combine": "max"}, "expected one of"),
    ],
)
def test_settings_are_checked_first(kwargs, message):
    with pytest.raises(InputError, match=message):
        judge("http://a", **kwargs)


@pytest.mark.slow
def test_a_judge_with_malformed_verdicts_trains_digits(tmp_path: Path) -> None:
    """One verdict in ten is malformed; the task is learned all the same."""
    from configs import ppo_digits
    from tests.controller import tiny
    from yatt_jax.controller.online import train
    from yatt_jax.controller.online_job import OnlineJob

    with standing_in(otherwise=verdicts(0.1)) as server:
        config: Any = ppo_digits.get_config("").unlock()
        config.compilation_cache = ""
        config.steps = 120
        kwargs = {"urls": (server.url,), "template": SHORT, "batch": 32}
        config.rewards = {"judge": {"fn": "yatt_jax.rewards.judge:Judge", "kwargs": kwargs, "std": 10.0}}
        with OnlineJob(tiny.plan(config), tmp_path / "run") as job:
            train(job)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    rewards = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert max(rewards) >= 0.9, rewards
    malformed = sum(line.get("rollout/reward_counts/judge/malformed", 0) for line in lines)
    asked = sum(line.get("rollout/reward_counts/judge/verdicts", 0) for line in lines)
    assert 0.07 < malformed / asked < 0.13
    assert all(line.get("rollout/reward_invalid/judge", 0) <= 3 for line in lines)
