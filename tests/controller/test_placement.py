"""The placement controller: forecasts worked by hand, and decisions that are reasonable and said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from yatt_jax.controller.forecast import GROUPS, Load, forecast, measured_load
from yatt_jax.controller.placement import (
    Decision,
    Limits,
    Measurements,
    Phase,
    Placement,
    neighbours,
    placements,
    replan,
)
from yatt_jax.rollout.pace import Chunk, fit_steps

SAMPLER = Load(busy=0, waiting=0, queue=0, rows=4, slots=4, lengths=(10, 10, 10, 10), step=1.0, row=0.0, admit=0.0)
LIMITS = Limits()


def placement(sampling: int, judging: int) -> Placement:
    return Placement((("sample", sampling), ("judge", judging)))


def test_decoding_that_only_reads_weights_takes_as_long_on_any_number_of_devices() -> None:
    assert [forecast([("sample", n)], {"sample": SAMPLER})[0] for n in (1, 2, 4)] == [10, 10, 10]


def test_rows_beyond_the_slots_wait() -> None:
    narrow = dataclasses.replace(SAMPLER, slots=1)
    assert [forecast([("sample", n)], {"sample": narrow})[0] for n in (1, 2, 4)] == [40, 20, 10]


def test_a_step_takes_longer_with_more_rows_on_a_device() -> None:
    # Four rows of 10 and 20 steps on two devices: ten steps with two rows each, then ten with one.
    load = dataclasses.replace(SAMPLER, lengths=(10, 20, 10, 20), row=0.5)
    assert forecast([("sample", 2)], {"sample": load})[0] == pytest.approx(10 * (1 + 2 * 0.5) + 10 * (1 + 1 * 0.5))


def test_devices_take_in_whole_rows() -> None:
    load = dataclasses.replace(SAMPLER, admit=3.0)
    assert [forecast([("sample", n)], {"sample": load})[0] for n in (1, 2, 3, 4)] == [22, 16, 16, 13]


def test_scoring_overlaps_with_sampling_and_ends_after_it() -> None:
    sampler = dataclasses.replace(SAMPLER, lengths=(10, 20, 30, 40))
    # A reward model: nothing is written, and a row takes 8 seconds of one device.
    judge = Load(busy=0, waiting=0, queue=0, rows=4, slots=1, lengths=(0,), step=0.0, row=0.0, admit=8.0)
    loads = {"sample": sampler, "judge": judge}
    assert forecast([("sample", 2), ("judge", 1)], loads) == (40, 48)
    slow = dataclasses.replace(judge, admit=12.0)  # comes at 10, 20, 30, 40; leaves at 22, 34, 46, 58
    assert forecast([("sample", 2), ("judge", 1)], loads | {"judge": slow}) == (40, 58)
    assert forecast([("sample", 2), ("judge", 1), ("other", 1)], loads | {"other": slow}) == (40, 58)


def test_replaced_rows_come_when_others_are_scored() -> None:
    sampler = dataclasses.replace(SAMPLER, replaced=2)
    judge = Load(busy=0, waiting=0, queue=0, rows=4, slots=4, lengths=(5,), step=1.0, row=0.0, admit=0.0, replaced=2)
    # Half of what is scored is replaced: two rows are scored at 15, one begins, is scored at 30, and the last begins.
    assert forecast([("sample", 1), ("judge", 1)], {"sample": sampler, "judge": judge}) == (40, 45)


def test_votes_are_rows_of_their_own() -> None:
    sampler = dataclasses.replace(SAMPLER, rows=1, lengths=(10,))
    judge = Load(busy=0, waiting=0, queue=0, rows=3, slots=8, lengths=(5, 5, 5), step=1.0, row=0.5, admit=2.0)
    # Three verdicts on two devices: two turns of taking in, and one and a half rows a device.
    assert forecast([("sample", 1), ("judge", 2)], {"sample": sampler, "judge": judge})[1] == 10 + 2 * 2 + 5 * 1.75
    idle = dataclasses.replace(judge, rows=0, lengths=())
    assert forecast([("sample", 1), ("judge", 2)], {"sample": sampler, "judge": idle}) == (10, 10)


@pytest.mark.parametrize("rows", [1, 3, GROUPS, GROUPS + 1, 7 * GROUPS + 3])
@pytest.mark.parametrize("replaced", [0, 1])
def test_every_row_is_forecast_to_end(rows: int, replaced: int) -> None:
    draw = np.random.default_rng(rows)
    lengths = tuple(draw.integers(1, 500, rows).tolist())
    load = Load(0, 0, 0, rows, 5, lengths, 0.01, 0.0003, 0.02, min(replaced, rows - 1))
    whole = [forecast([("sample", n), ("judge", 3)], {"sample": load, "judge": load}) for n in (1, 2, 5)]
    assert all(0 < sampled < done < math.inf for sampled, done in whole)
    assert whole[0][0] >= whole[1][0] >= whole[2][0]


def test_nothing_to_do_takes_no_time() -> None:
    assert forecast([("sample", 1)], {"sample": dataclasses.replace(SAMPLER, rows=0)}) == (0, 0)


def test_seconds_of_a_step_are_fitted() -> None:
    chunks = [Chunk(rows, 16, 16 * (0.008 + 0.0002 * rows)) for rows in (32.0, 20.0, 4.0, 1.0)]
    assert fit_steps(chunks) == pytest.approx((0.008, 0.0002))
    assert fit_steps(chunks[:1]) == pytest.approx((0.008 + 0.0064, 0.0))
    assert fit_steps([Chunk(1, 4, 4.0), Chunk(2, 4, 1.0)]) == pytest.approx((0.625, 0.0))  # no sense in a negative cost
    step, row = fit_steps([Chunk(1, 4, 1.0), Chunk(2, 4, 4.0)])
    assert step == 0
    assert row == pytest.approx((1.0 * 1 + 4.0 * 2) / (4 * 1 + 4 * 4))


def test_a_load_is_measured_from_chunks() -> None:
    def chunk(rows: int, admitted: int, waiting: int = 0) -> Chunk:
        taking_in = 0.5 * math.ceil(admitted / 2)  # two devices
        return Chunk(rows, 16, 16 * (0.01 + 0.001 * rows) + taking_in, admitted, waiting)

    chunks = [chunk(8, 16, 4), chunk(8, 3, 1), chunk(8, 0), chunk(4, 0), chunk(2, 0)]
    load = measured_load(chunks, [30, 50] * 10, seconds=10.0, devices=2, slots=8)
    assert (load.step, load.row, load.admit) == pytest.approx((0.01, 0.001, 0.5))
    assert (load.rows, load.slots, load.lengths[:2]) == (20, 8, (30, 50))
    assert load.busy == pytest.approx(sum(c.seconds for c in chunks))
    assert load.waiting == pytest.approx(10.0 - load.busy)
    assert load.queue == pytest.approx((4 * chunks[0].seconds + chunks[1].seconds) / load.busy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"busy": -1.0}, "busy = -1.0"),
        ({"row": math.nan}, "row = nan"),
        ({"slots": 0}, "slots = 0"),
        ({"lengths": ()}, "4 rows and no lengths"),
        ({"replaced": 5}, "replaced = 5"),
    ],
)
def test_a_load_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SAMPLER, **change)  # type: ignore[arg-type]


def test_placements() -> None:
    assert [str(p) for p in placements(("sample", "judge"), 4, {})] == [
        "sample 1 + judge 3",
        "sample 2 + judge 2",
        "sample 3 + judge 1",
    ]
    assert placements(("sample", "judge"), 8, {"judge": 4}) == [placement(4, 4)]
    assert len(placements(("sample", "judge", "reward"), 8, {})) == 21
    assert placement(5, 3)["judge"] == 3
    for wrong in ((), (("sample", 0),), (("sample", 1), ("sample", 2))):
        with pytest.raises(ValueError, match="shares = "):
            Placement(wrong)


def test_neighbours_keep_units_and_reach() -> None:
    assert set(neighbours(placement(4, 4), LIMITS)) == {placement(n, 8 - n) for n in (2, 3, 5, 6)}
    assert set(neighbours(placement(1, 7), LIMITS)) == {placement(2, 6), placement(3, 5)}
    assert set(neighbours(placement(4, 4), Limits(units={"judge": 2}, reach=1))) == {placement(2, 6), placement(6, 2)}
    three = Placement((("sample", 2), ("judge", 2), ("reward", 1)))
    assert {str(p) for p in neighbours(three, Limits(reach=1))} == {
        "sample 1 + judge 3 + reward 1",
        "sample 1 + judge 2 + reward 2",
        "sample 3 + judge 1 + reward 1",
        "sample 2 + judge 1 + reward 2",
    }


def measured(now: Placement, sampling: float = 100.0, judging: float = 100.0, outside: float = 0.0) -> Phase:
    """A phase in which roles work one row at a time on each device, with so many device-seconds of work."""
    rows = 64

    def load(work: float) -> Load:
        each = max(1, round(10 * work / rows))
        return Load(0, 0, 0, rows, 1, (each,) * rows, 0.1, 0.0, 0.0)

    loads = {"sample": load(sampling), "judge": load(judging)}
    sampled, done = forecast(now.shares, loads)
    seconds = max(done, sampled + outside)
    for role, work in (("sample", sampling), ("judge", judging)):
        busy = work / now[role]
        loads[role] = dataclasses.replace(loads[role], busy=busy, waiting=max(0.0, seconds - busy))
    return Phase(now, seconds, outside, loads)


def decide(
    phases: Sequence[Phase], limits: Limits = LIMITS, compiled: Sequence[Placement] | None = None, **costs: float
) -> Decision:
    there = placements(("sample", "judge"), 8, {}) if compiled is None else compiled
    return replan(phases[-1].placement, Measurements(phases, compiled=there, **costs), limits)


def test_devices_go_where_the_work_is() -> None:
    now = placement(4, 4)
    up = decide([measured(now, sampling=300)] * 4)
    assert up.placement == placement(6, 2)
    assert up.reason.startswith("moves to sample 6 + judge 2: ")
    assert "waiting was" in up.reason
    assert decide([measured(now, judging=300)] * 4).placement == placement(2, 6)


def test_what_is_balanced_stays() -> None:
    found = decide([measured(placement(4, 4))] * 4)
    assert found.placement == placement(4, 4)
    assert "no gain of 4% that lasts" in found.reason
    assert found.seconds == pytest.approx(measured(placement(4, 4)).seconds)


def test_one_phase_is_no_evidence() -> None:
    now = placement(4, 4)
    odd, usual = measured(now, sampling=400), measured(now)
    assert decide([usual, usual, usual, odd]).placement == now
    assert decide([usual, usual, odd, usual]).placement == now
    assert decide([usual, usual, odd, odd]).placement == placement(6, 2)
    assert decide([odd]).reason == "stays: 1 of 2 phases measured"


def test_a_placement_is_used_for_some_phases() -> None:
    before, now = placement(3, 5), placement(4, 4)
    busy = [measured(before), measured(before), measured(now, sampling=400), measured(now, sampling=400)]
    found = decide(busy)
    assert found.placement == now
    assert "in use for 2 of 3 phases" in found.reason
    assert decide([*busy, busy[-1]]).placement == placement(6, 2)


def test_a_move_has_to_earn_what_it_costs() -> None:
    phases = [measured(placement(4, 4), sampling=200)] * 4
    gain = (phases[0].seconds - decide(phases).seconds) * LIMITS.horizon
    assert decide(phases, move_seconds=0.9 * gain).placement != placement(4, 4)
    dear = decide(phases, move_seconds=1.1 * gain)
    assert dear.placement == placement(4, 4)
    assert "and costs" in dear.reason


def test_a_new_split_is_compiled_before_it_is_used() -> None:
    phases = [measured(placement(4, 4), sampling=300)] * 4
    waits = decide(phases, compiled=[placement(4, 4)], compile_seconds=1e6)
    assert waits.placement == placement(4, 4)
    assert waits.compile == (placement(6, 2),)
    assert "whose programs are still to be compiled" in waits.reason
    foreground = Limits(background=False)
    assert decide(phases, foreground, [placement(4, 4)], compile_seconds=1.0).placement == placement(6, 2)
    assert decide(phases, foreground, [placement(4, 4)], compile_seconds=1e6).placement == placement(4, 4)


def test_the_next_split_is_compiled_ahead() -> None:
    found = decide([measured(placement(4, 4))] * 4, compiled=[placement(4, 4)])
    assert found.placement == placement(4, 4)
    assert len(found.compile) == 1


def test_waiting_for_a_server_moves_nothing() -> None:
    now = placement(4, 4)
    usual, spike = measured(now), measured(now, outside=500.0)
    assert spike.seconds > 500
    assert decide([usual, usual, spike]).placement == now
    assert decide([usual, usual, spike, spike]).placement == now


def test_evidence_that_contradicts_the_forecast_moves_nothing() -> None:
    phase = measured(placement(4, 4), sampling=300)
    judge = dataclasses.replace(phase.loads["judge"], waiting=0.0, queue=9.0)
    odd = dataclasses.replace(phase, loads={**phase.loads, "judge": judge})
    assert decide([phase] * 4).placement == placement(6, 2)
    waits = dataclasses.replace(phase.loads["sample"], waiting=5.0)
    odd = dataclasses.replace(odd, loads={**odd.loads, "sample": waits})
    found = decide([odd] * 4)
    assert found.placement == placement(4, 4)


def test_a_phase_has_a_load_for_each_role() -> None:
    with pytest.raises(ValueError, match=r"loads of \['sample'\]"):
        Phase(placement(4, 4), 1.0, 0.0, {"sample": SAMPLER})


@pytest.mark.parametrize("name", ["reach", "window", "dwell", "horizon", "gain"])
def test_limits_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0"):
        dataclasses.replace(LIMITS, **{name: 0})
    with pytest.raises(ValueError, match="units"):
        Limits(units={"judge": 0})
