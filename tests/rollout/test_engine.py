"""The sampling loop: exact log-probabilities, results that depend on nothing they should not, and how rows end."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compilations import compilations
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.ops.select import unpack_kept
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.rollout.assemble import padded_length
from yatt_jax.rollout.device import Copies
from yatt_jax.rollout.engine import Engine, Progress
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.rollout.session import row_controls
from yatt_jax.types import Inputs, Params, Prompt, Rollout, Sample

VOCAB, CAPACITY = 53, 12
LENGTHS = [3, 1, 9, 16, 5, 2, 7, 8, 11, 13, 4]


class Letters:
    """A tokenizer of one character an id; the last is special and has no text."""

    all_special_tokens = ("<end>",)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(65 + i) for i in token_ids if i != VOCAB - 1)


def prompt_of(tokens: Sequence[int], source: str = "file:1") -> Prompt:
    return Prompt([], "", list(tokens), {}, source, 0)


@functools.cache
def model() -> Model:
    config = DecoderConfig(
        vocab=VOCAB, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=24, tied=False, windows=(0, 4)
    )
    return build("lm", config)


@functools.cache
def partition(devices: int, tensor: int = 1) -> Partition:
    return make_partitions(Split(), Split(tensor=tensor), jax.devices()[:devices])[1]


@functools.cache
def params(devices: int = 1, tensor: int = 1, seed: int = 0) -> Params:
    tree = model().init(seed, partition(devices, tensor))
    return {**tree, "unembedding": tree["unembedding"] * 6}  # sharper than a fresh model, far from uniform


@functools.cache
def engine(rows: int = 4, devices: int = 1, tensor: int = 1, **options: Any) -> Engine:
    settings: dict[str, Any] = {"max_prompt_tokens": 16, "max_new_tokens": CAPACITY, "record_kept": True, **options}
    return Engine(model(), Letters(), partition(devices, tensor), rows=rows, **settings)


@functools.cache
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [prompt_of(rng.integers(0, VOCAB, n).tolist()) for n in LENGTHS]


def generate(
    sampling: Sampling,
    using: Engine | None = None,
    weights: Params | None = None,
    order: Sequence[int] | None = None,
    seed: int = 7,
    given: list[Prompt] | None = None,
) -> tuple[Rollout, list[Sample]]:
    given = prompts() if given is None else given
    order = range(len(given)) if order is None else order
    return (using or engine()).generate(
        params() if weights is None else weights,
        [given[i] for i in order],
        sampling,
        seed=seed,
        sample_ids=[100 + i for i in order],
        groups=list(order),
        version=3,
    )


def full_forward(rollout: Rollout, weights: Params) -> jax.Array:
    """Logits that predict tokens 1, 2, ..., without a cache."""
    inputs = jax.tree.map(jnp.asarray, rollout.inputs)

    @jax.jit
    def run(weights: Params) -> jax.Array:
        lm = model().bind(weights)
        return lm.logits(lm(inputs)[0])

    return run(weights)[:, :-1]


def logprobs(logits: jax.Array, rollout: Rollout) -> np.ndarray:
    every = np.asarray(jax.nn.log_softmax(logits))
    return np.take_along_axis(every, np.asarray(rollout.inputs.tokens)[:, 1:, None], 2)[..., 0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.6, max_new_tokens=CAPACITY),
        Sampling(temperature=1.0, max_new_tokens=CAPACITY),
        Sampling(temperature=1.3, max_new_tokens=CAPACITY, top_p=0.9),
        Sampling(temperature=0.6, max_new_tokens=CAPACITY, top_k=20, top_p=0.9, min_p=0.01),
        Sampling(temperature=1.0, max_new_tokens=CAPACITY, min_new_tokens=8, stop_token_ids=tuple(range(16))),
        Sampling(temperature=0.0, max_new_tokens=CAPACITY),
    ],
)
def test_log_probabilities_are_those_of_a_fresh_forward_pass(sampling: Sampling) -> None:
    rollout, samples = generate(sampling)
    logits = full_forward(rollout, params()) / (sampling.temperature or 1.0)
    mask = np.asarray(rollout.response_mask)[:, 1:]
    assert mask.sum() == sum(len(s.tokens) for s in samples) > 50
    np.testing.assert_allclose(logprobs(logits, rollout) * mask, rollout.plain_logprobs[:, 1:], atol=1e-4)
    assert rollout.kept is not None
    kept = unpack_kept(jnp.asarray(rollout.kept), VOCAB)[:, 1:]
    shaped = jnp.where(kept, logits, -jnp.inf)
    np.testing.assert_allclose(logprobs(shaped, rollout) * mask, rollout.sampled_logprobs[:, 1:], atol=1e-4)
    assert np.asarray(kept)[mask == 0].all()
    filtered = sampling.temperature == 0 or sampling.top_p < 1 or sampling.min_new_tokens > 0
    assert (np.asarray(kept)[mask == 1].mean() < 1) == filtered


def test_rows_are_prompt_and_response_side_by_side() -> None:
    rollout, samples = generate(Sampling(max_new_tokens=5))
    assert rollout.inputs.tokens.shape == (11, 32)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(rollout))
    for b, (prompt, sample) in enumerate(zip(prompts(), samples, strict=True)):
        begin, end = len(prompt.tokens), len(prompt.tokens) + 5
        assert rollout.inputs.tokens[b, :end].tolist() == prompt.tokens + sample.tokens
        assert rollout.inputs.positions[b, :end].tolist() == list(range(end))
        assert rollout.inputs.segments[b].tolist() == [1] * end + [0] * (32 - end)
        assert np.flatnonzero(rollout.response_mask[b]).tolist() == list(range(begin, end))
        assert not np.asarray(rollout.sampled_logprobs)[b, rollout.response_mask[b] == 0].any()
        assert sample.prompt is prompt
        assert sample.finish == "length"
        assert sample.completion == Letters().decode(
            sample.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert (sample.sample_id, sample.group) == (100 + b, b)
    assert np.asarray(rollout.sample_id).tolist() == [100 + b for b in range(11)]
    assert np.asarray(rollout.group).tolist() == list(range(11))
    assert np.asarray(rollout.version).tolist() == [3] * 11
    assert not np.asarray(rollout.ended).any()


EVERYTHING = Sampling(
    temperature=0.9, top_p=0.97, max_new_tokens=12, min_new_tokens=2, stop_token_ids=(35, 13), stop=("SL", "NN", "e")
)


@pytest.mark.parametrize(
    ("rows", "devices", "tensor", "options"),
    [
        (3, 1, 1, {"chunk": 1, "pack": 4}),
        (16, 1, 1, {"chunk": 5, "max_prompt_tokens": 24, "unroll": False}),
        (8, 8, 1, {}),
        (6, 8, 2, {"unroll": False, "pack": 6}),
    ],
    ids=["3 slots, pieces", "16 slots, scanned", "data 8", "data 4 x tensor 2, scanned, pieces"],
)
def test_samples_depend_on_seed_and_sample_alone(rows: int, devices: int, tensor: int, options: dict[str, Any]) -> None:
    reference, expected = generate(EVERYTHING)
    assert {s.finish for s in expected} == {"stop", "stop_string", "length"}
    order = np.random.default_rng(rows).permutation(len(LENGTHS)).tolist()
    rollout, samples = generate(
        EVERYTHING, engine(rows, devices, tensor, **options), params(devices, tensor), order=order
    )
    for sample, i in zip(samples, order, strict=True):
        assert dataclasses.replace(sample, group=0) == dataclasses.replace(expected[i], group=0)
    for name in ("sampled_logprobs", "plain_logprobs"):
        # Relative to the value as well: log-probabilities of a model reach tens of nats.
        np.testing.assert_allclose(getattr(rollout, name), getattr(reference, name)[order], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rollout.kept, np.asarray(reference.kept)[order])
    np.testing.assert_array_equal(rollout.inputs.tokens, np.asarray(reference.inputs.tokens)[order])


def test_rows_and_prompts_of_one() -> None:
    _, expected = generate(EVERYTHING)
    # A prompt of one token has no prefill; one as long as the bucket fills it.
    for i, padded in ((1, 16), (3, 32)):
        rollout, samples = generate(EVERYTHING, engine(rows=1), order=[i])
        assert samples[0].tokens == expected[i].tokens
        assert rollout.inputs.tokens.shape == (1, padded)
    rollout, samples = generate(Sampling(max_new_tokens=1))
    assert engine().stats.steps == engine().stats.chunks == 3
    assert all(len(s.tokens) == 1 and s.finish == "length" for s in samples)


def test_seeds_give_different_samples_and_samples_differ() -> None:
    sampling = Sampling(max_new_tokens=CAPACITY)
    texts = [tuple(s.completion for s in generate(sampling, seed=seed)[1]) for seed in (7, 7, 8, 7 + 2**32)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    _, copies = generate(sampling, given=[prompts()[0]] * 8)
    assert len({s.completion for s in copies}) == 8


def test_greedy_takes_the_largest_logit() -> None:
    rollout, _ = generate(Sampling(temperature=0, max_new_tokens=CAPACITY, top_p=0.5))
    best = np.asarray(jnp.argmax(full_forward(rollout, params()), -1))
    mask = np.asarray(rollout.response_mask)[:, 1:] == 1
    np.testing.assert_array_equal(np.asarray(rollout.inputs.tokens)[:, 1:][mask], best[mask])
    assert not np.asarray(rollout.sampled_logprobs).any()


def test_new_weights_take_effect() -> None:
    sampling = Sampling(max_new_tokens=CAPACITY)
    generate(sampling)
    rollout, _ = generate(sampling, weights=params(seed=1))
    mask = np.asarray(rollout.response_mask)[:, 1:]
    fresh = logprobs(full_forward(rollout, params(seed=1)), rollout) * mask
    np.testing.assert_allclose(fresh, rollout.plain_logprobs[:, 1:], atol=1e-4)


def test_nothing_compiles_when_values_change() -> None:
    with compilations() as before:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert before  # the counter counts
    for devices, using in ((1, engine()), (8, engine(8, 8))):
        weights = params(devices)
        for _ in range(2):
            generate(EVERYTHING, using, weights)
        with compilations() as seen:
            for sampling in (
                Sampling(temperature=0.3, top_k=4, max_new_tokens=3),
                Sampling(temperature=0.0, max_new_tokens=11, stop_token_ids=(1,)),
                Sampling(min_p=0.1, max_new_tokens=12, min_new_tokens=5, stop_token_ids=(1, 2, 3)),
                Sampling(max_new_tokens=7, stop=("A", "bc")),
            ):
                generate(sampling, using, weights, seed=2**40 + 5)
                generate(sampling, using, weights, given=prompts()[:2])
                generate(sampling, using, weights, given=[prompt_of(range(n)) for n in (2, 6, 15)])
        assert seen == []


def test_split_rows_exchange_nothing_but_flags_and_counts() -> None:
    programs = engine(8, 8)._programs
    layers = programs.lay_out(params(8))
    caches, rows = programs.start()
    args = (params(8), layers, caches, rows, row_controls(EVERYTHING, 8, VOCAB), np.zeros(8, bool), 1, 1)
    text = programs.decode.lower(*args).compile().as_text() or ""
    nothing, none = jnp.zeros((8, 8), jnp.int32), jnp.zeros((8, 1), jnp.int32)
    packs = Inputs(nothing, nothing, nothing)
    copies = Copies(none, none, none, jnp.zeros(8, jnp.int32))
    text += programs.prefill.lower(params(8), layers, caches, packs, copies).compile().as_text() or ""
    moved = re.findall(r"= (\S+) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text)
    assert moved
    assert set(moved) <= {"pred[]", "s32[]"}


def test_stop_ids_end_rows_and_no_step_follows_the_last() -> None:
    _, free = generate(Sampling(max_new_tokens=CAPACITY))
    stop = (free[3].tokens[5], free[0].tokens[2], free[1].tokens[7], free[10].tokens[0])
    rollout, samples = generate(Sampling(max_new_tokens=CAPACITY, stop_token_ids=stop))
    stats = engine().stats
    lengths = [len(s.tokens) for s in samples]
    # Four slots: whoever waits takes the slot of the first to end.
    slots = [0] * 4
    for length in lengths:
        slots[slots.index(min(slots))] += length
    assert stats.steps == max(slots) < 36
    assert stats.tokens == sum(lengths)
    assert stats.computed == 4 * stats.steps
    assert {s.finish for s in samples} == {"stop", "length"}
    for b, (before, sample) in enumerate(zip(free, samples, strict=True)):
        hits = [at + 1 for at, token in enumerate(before.tokens) if token in stop]
        assert sample.tokens == before.tokens[: hits[0] if hits else CAPACITY]
        assert sample.finish == ("stop" if hits else "length")
        assert bool(np.asarray(rollout.ended)[b]) == bool(hits)
    assert len(samples[10].tokens) == 1


def test_steps_end_when_every_row_stops_at_its_first_token() -> None:
    greedy = Sampling(temperature=0, max_new_tokens=CAPACITY)
    first = [s.tokens[0] for s in generate(greedy)[1]]
    _, samples = generate(dataclasses.replace(greedy, stop_token_ids=tuple(sorted(set(first)))))
    assert [s.tokens for s in samples] == [[t] for t in first]
    assert {s.finish for s in samples} == {"stop"}
    assert engine().stats.steps == 3  # of four, four and three rows


def test_stop_ids_wait_for_the_least_length() -> None:
    _, free = generate(Sampling(max_new_tokens=CAPACITY))
    stop = tuple(sorted({t for s in free[:3] for t in s.tokens[:6]}))[:16]
    _, early = generate(Sampling(max_new_tokens=CAPACITY, stop_token_ids=stop))
    _, late = generate(Sampling(max_new_tokens=CAPACITY, min_new_tokens=6, stop_token_ids=stop))
    assert min(len(s.tokens) for s in early) < 6
    for sample in late:
        assert len(sample.tokens) >= 6
        assert not set(sample.tokens[:5]) & set(stop)
    assert any(len(s.tokens) < CAPACITY and s.finish == "stop" for s in late)


def test_stop_strings_cut_text_and_tokens() -> None:
    free = generate(Sampling(temperature=0.9, max_new_tokens=CAPACITY))[1]
    stop = (free[2].completion[4:6], free[5].completion[0])
    rollout, samples = generate(Sampling(temperature=0.9, max_new_tokens=CAPACITY, stop=stop))
    assert engine().stats.dropped == sum(len(f.tokens) - len(s.tokens) for f, s in zip(free, samples, strict=True))
    for b, (before, sample) in enumerate(zip(free, samples, strict=True)):
        found = [at for at in (before.completion.find(s) for s in stop) if at >= 0]
        assert sample.finish == ("stop_string" if found else "length")
        assert sample.tokens == before.tokens[: len(sample.tokens)]
        assert not any(s in sample.completion for s in stop)
        if found:
            assert sample.completion == before.completion[: len(sample.completion)]
        assert bool(np.asarray(rollout.ended)[b]) == bool(found)
        assert np.asarray(rollout.response_mask)[b].sum() == len(sample.tokens)
    assert samples[5].completion == ""
    assert len(samples[2].tokens) <= 6


def test_rows_whose_logits_are_not_numbers_end_and_do_not_spread() -> None:
    sampling = Sampling(max_new_tokens=CAPACITY, top_p=0.9)
    _, expected = generate(sampling)
    seen = {t for s in expected for t in (*s.tokens, *s.prompt.tokens)}
    poison = next(t for t in range(VOCAB) if t not in seen)
    tree = params()
    embedding = tree["decoder"]["embedding"].at[poison].set(jnp.nan)
    weights = {**tree, "decoder": {**tree["decoder"], "embedding": embedding}}
    # The longest prompts go first, so that clean rows follow in the slots of the poisoned ones.
    given = [prompt_of([1] * 15 + [poison]) for _ in range(3)] + prompts()
    rollout, samples = engine().generate(
        weights,
        given,
        sampling,
        seed=7,
        sample_ids=[*range(3), *range(100, 111)],
        groups=range(14),
        version=0,
    )
    assert [s.finish for s in samples[:3]] == ["invalid"] * 3
    assert [s.tokens for s in samples[:3]] == [[]] * 3
    assert engine().stats.invalid == 3
    assert [s.tokens for s in samples[3:]] == [s.tokens for s in expected]
    assert not np.asarray(rollout.ended)[:3].any()
    for leaf in jax.tree.leaves(rollout):
        assert np.isfinite(leaf).all()
    assert not np.asarray(rollout.response_mask)[:3].any()


def test_a_cache_of_lower_precision_and_no_support_recorded() -> None:
    rollout, _ = generate(Sampling(max_new_tokens=CAPACITY), engine(cache_dtype="bfloat16", record_kept=False))
    assert rollout.kept is None
    mask = np.asarray(rollout.response_mask)[:, 1:]
    difference = np.abs(logprobs(full_forward(rollout, params()), rollout) * mask - rollout.plain_logprobs[:, 1:])
    assert 1e-5 < difference.max() < 0.2


def test_progress_counts_up_to_the_end() -> None:
    told: list[Progress] = []
    using = Engine(
        model(),
        Letters(),
        partition(1),
        rows=4,
        max_prompt_tokens=16,
        max_new_tokens=CAPACITY,
        record_kept=True,
        chunk=5,
        progress=told.append,
    )
    _, samples = generate(Sampling(max_new_tokens=CAPACITY), using)
    assert samples == generate(Sampling(max_new_tokens=CAPACITY))[1]
    assert [p.stage for p in told].count("compile") == 1
    assert told[0].stage == "compile"
    # A row that has ended is looked at while the next chunk is decoded.
    assert [p.ended for p in told] == [0, 0, 0, 0, 4, 4, 4, 8, 8, 8, 11]
    assert [p.tokens for p in told] == [0, 20, 40, 48, 68, 88, 96, 111, 126, 132, 132]
    assert {p.prompts for p in told} == {11}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"given": [prompt_of([1]), prompt_of([], "data/a.jsonl:7")]}, r"data/a.jsonl:7: the prompt has no tokens"),
        ({"given": [prompt_of([1] * 17, "b.jsonl:2")]}, r"b.jsonl:2: the prompt has 17 tokens.* allowed has 16"),
        ({"given": [prompt_of([VOCAB], "c.jsonl:3")]}, r"c.jsonl:3: .* outside the vocabulary of 53"),
        ({"sampling": Sampling(max_new_tokens=13)}, r"max_new_tokens = 13 is above .* = 12"),
        ({"sampling": Sampling(max_new_tokens=2, stop_token_ids=(53,))}, r"stop_token_ids: 53 .* 53"),
        ({"sampling": Sampling(max_new_tokens=2, stop=("<end>",))}, r"'<end>' is a special token"),
        ({"seed": -1}, r"seed = -1"),
    ],
)
def test_bad_requests_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(**{"sampling": Sampling(max_new_tokens=2), **change})


def test_bad_settings_are_refused() -> None:
    good: dict[str, Any] = {"rows": 2, "max_prompt_tokens": 4, "max_new_tokens": 3}
    for name in ("rows", "max_prompt_tokens", "max_new_tokens", "chunk", "pack"):
        with pytest.raises(ValueError, match=f"{name} = 0"):
            Engine(model(), Letters(), partition(1), **{**good, name: 0})
    with pytest.raises(ValueError, match="value model"):
        Engine(build("value", model().config), Letters(), partition(1), **good)
    with pytest.raises(ValueError, match="2 prompts, 1 sample_ids"):
        engine().generate(
            params(), prompts()[:2], Sampling(max_new_tokens=2), seed=0, sample_ids=[1], groups=[0, 1], version=0
        )
    assert Engine(model(), Letters(), partition(8), **good).rows == 8


def test_no_prompts_give_no_rows() -> None:
    rollout, samples = generate(Sampling(max_new_tokens=2), given=[])
    assert samples == []
    assert rollout.inputs.tokens.shape == (0, 16)


def test_padded_length() -> None:
    lengths = [1, 32, 33, 128, 129, 256, 257, 320, 321, 512, 513, 640, 1024, 1025, 4097]
    padded = [16, 32, 48, 128, 160, 256, 320, 320, 384, 512, 640, 640, 1024, 1280, 5120]
    assert [padded_length(n) for n in lengths] == padded
    assert len({padded_length(n) for n in range(1, 8193)}) == 8 + 4 * 6
