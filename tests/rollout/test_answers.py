"""Rows that hold what was sampled and what the data answers."""

from __future__ import annotations

import numpy as np

from yatt_jax.rollout.answers import with_answers
from yatt_jax.rollout.assemble import Result, assemble
from yatt_jax.types import Prompt, Sample


def test_the_answer_is_a_document_of_its_own() -> None:
    prompts = [Prompt([], "", [7, 8], {}, "", 0, answer=(1, 2, 3)), Prompt([], "", [9] * 9, {}, "", 1, answer=(4,))]
    results = [
        Result(np.array(tokens, np.int32), np.full(len(tokens), -1.0), np.full(len(tokens), -2.0), None, "stop", "")
        for tokens in ([5], [6] * 6)
    ]
    samples = [Sample(prompt, "", [], "stop", i, i) for i, prompt in enumerate(prompts)]
    before = assemble(prompts, results, samples, [0, 0], None)
    rows = with_answers(before, prompts)
    assert rows.inputs.tokens.shape == (2, 32)  # 15 tokens and 10 more
    assert rows.inputs.tokens[0].tolist() == [7, 8, 5, 7, 8, 1, 2, 3] + [0] * 24
    assert rows.inputs.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4] + [0] * 24
    assert rows.inputs.segments[0].tolist() == [1] * 3 + [2] * 5 + [0] * 24
    assert rows.response_mask[0].tolist() == [0, 0, 1, 0, 0, 1, 1, 1] + [0] * 24
    assert rows.sampled_logprobs[0].tolist() == [0, 0, -1] + [0] * 29
    assert rows.inputs.tokens[1].tolist() == [9] * 9 + [6] * 6 + [9] * 9 + [4] + [0] * 7
    assert np.sum(rows.response_mask[1]) == 7
    np.testing.assert_array_equal(rows.sample_id, before.sample_id)
