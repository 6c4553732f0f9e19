from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.groups import Advantage, all_equal, best_of, group_advantages, group_faults, group_mean, group_std

ONE = jnp.array([1.0, 0.0, 0.0, 1.0])
SAME = jnp.zeros(4, jnp.int32)
ALL = jnp.ones(4)
NAN = jnp.nan


def found(scores, options, group=None, counts=None):
    scores = jnp.asarray(scores, jnp.float32)
    group = jnp.zeros(len(scores), jnp.int32) if group is None else jnp.asarray(group)
    counts = jnp.isfinite(scores).astype(jnp.float32) if counts is None else jnp.asarray(counts, jnp.float32)
    return np.asarray(group_advantages(scores, group, counts, options))


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (Advantage("group_mean", "group_std"), 0.86588),  # GRPO: .5 / (.57735 + 1e-4)
        (Advantage("group_mean", "none"), 0.5),  # Dr. GRPO
        (Advantage("leave_one_out", "none"), 0.66667),  # RLOO
        (Advantage("group_mean", "batch_std"), 0.86588),  # one group is the batch
        (Advantage("leave_one_out", "group_std"), 1.154500),
    ],
)
def test_hand_worked_values(options, value):
    np.testing.assert_allclose(found(ONE, options), value * np.array([1, -1, -1, 1]), atol=1e-5)


def test_the_standard_deviation_is_the_sample_one():
    # The population's, with 1e-6, would give .999998.
    assert float(group_std(ONE, SAME, ALL)[0]) == pytest.approx(0.577350, abs=1e-6)
    assert abs(found(ONE, Advantage())[0] - 0.999998) > 0.1


def test_without_a_baseline_scores_stay():
    np.testing.assert_allclose(found([1.0, NAN, 3.0], Advantage("none", "none")), [1.0, 0.0, 3.0])
    std = np.std([1.0, 3.0], ddof=1)
    expected = np.array([1.0, 0.0, 3.0]) / (std + 1e-4)
    np.testing.assert_allclose(found([1.0, NAN, 3.0], Advantage("none", "group_std")), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Advantage("group_mean", "none"), [1 / 3, 0, -2 / 3, 1 / 3]),
        (Advantage("leave_one_out", "none"), [0.5, 0, -1.0, 0.5]),
        (Advantage("group_mean", "group_std"), np.array([1 / 3, 0, -2 / 3, 1 / 3]) / (np.sqrt(1 / 3) + 1e-4)),
        (Advantage("group_mean", "batch_std"), np.array([1 / 3, 0, -2 / 3, 1 / 3]) / (np.sqrt(1 / 3) + 1e-4)),
    ],
)
def test_an_invalid_reward_leaves_the_statistics_to_the_others(options, expected):
    np.testing.assert_allclose(found([1.0, NAN, 0.0, 1.0], options), expected, atol=1e-5)
    counts = jnp.array([1.0, 0.0, 1.0, 1.0])
    assert float(group_mean(jnp.array([1.0, NAN, 0.0, 1.0]), SAME, counts)[0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize(
    "scores", [[0.7] * 3, [0.1] * 7, [0.0] * 4, [1e6 + 0.1] * 5, [NAN, 3.3, NAN], [NAN, NAN], [0.3]]
)
def test_equal_rewards_or_a_single_valid_one_give_exactly_zero(baseline, scale, scores):
    np.testing.assert_array_equal(found(scores, Advantage(baseline, scale)), np.zeros(len(scores)))


OPTIONS = [Advantage(b, s) for b in ("group_mean", "leave_one_out", "none") for s in ("group_std", "batch_std", "none")]


def plain(scores, group, counts, options):
    """The definitions, group by group, in float64."""
    out, valid = np.zeros(len(scores)), counts > 0
    for g in set(group):
        at = np.flatnonzero((group == g) & valid)
        r = scores[at].astype(np.float64)
        for place, row in enumerate(at):
            others = np.delete(r, place)
            baseline = {"group_mean": r.mean(), "none": 0.0}.get(options.baseline)
            if baseline is None:
                baseline = others.mean() if len(others) else r.mean()
            std = {
                "group_std": np.std(r, ddof=1) if len(r) > 1 else 0.0,
                "batch_std": np.std(scores[valid].astype(np.float64), ddof=1),
            }.get(options.scale)
            out[row] = (r[place] - baseline) / (1.0 if std is None else std + 1e-4)
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_the_definition_in_any_order_and_over_devices(options):
    rng = np.random.default_rng(0)
    group = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 7, 7], np.int32)  # numbers may have gaps
    scores = rng.normal(size=16).astype(np.float32)
    counts = np.ones(16, np.float32)
    counts[[2, 8, 9, 13]] = 0
    scores[[8, 13]] = np.nan
    order = rng.permutation(16)
    expected = plain(scores, group, counts, options)
    got = found(scores, options, group, counts)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_allclose(found(scores[order], options, group[order], counts[order]), expected[order], atol=2e-5)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("rows",))
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    spread = jax.device_put((scores[order], group[order], counts[order]), rows)
    over_devices = jax.jit(group_advantages, static_argnums=3, out_shardings=rows)(*spread, options)
    np.testing.assert_allclose(over_devices, expected[order], atol=2e-5)


def test_padding_rows_do_not_join_group_zero():
    padded = found([1.0, 0.0, 0.0, 1.0, 0.0, NAN], Advantage(), group=[0, 0, 0, 0, 0, 0], counts=[1, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(padded[:4], found(ONE, Advantage()), atol=1e-7)
    np.testing.assert_array_equal(padded[4:], [0.0, 0.0])


def test_all_equal():
    scores = jnp.array([1.0, 1.0, 1.0, 2.0, NAN, 5.0])
    group = jnp.array([0, 0, 1, 1, 2, 2])
    counts = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    np.testing.assert_array_equal(all_equal(scores, group, counts), [True, True, False, False, True, True])


def test_best_of():
    scores = jnp.array([1.0, 5.0, 3.0, NAN, 2.0, 2.0, 9.0, 4.0])
    group = jnp.array([1, 0, 0, 0, 1, 1, 0, 2])
    counts = jnp.array([1.0, 1, 1, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(best_of(scores, group, counts, 1), [0, 1, 0, 0, 1, 0, 0, 1])
    np.testing.assert_array_equal(best_of(scores, group, counts, 2), [0, 1, 1, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(best_of(scores, group, counts, 9), counts)
    assert not best_of(scores, group, jnp.zeros(8), 1).any()


def test_a_single_response_with_a_group_baseline_is_a_fault():
    assert Advantage().faults(2) == []
    assert Advantage("none", "batch_std").faults(1) == []
    [fault] = Advantage("leave_one_out", "none").faults(1)
    assert fault.startswith("config.rollout.samples_per_prompt = 1: config.hyper.advantage.baseline = 'leave_one_out'")
    assert "at least 2" in fault
    [fault] = Advantage("none", "group_std").faults(1)
    assert "config.hyper.advantage.scale = 'group_std'" in fault
    assert group_faults(3, "x") == []


def test_unknown_kinds():
    with pytest.raises(ValueError, match=r"baseline = 'mean': expected one of .*group_mean"):
        Advantage("mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="scale = 'std'"):
        Advantage(scale="std")  # pyright: ignore[reportArgumentType]
