"""The simulated world against figures worked by hand, and what the controller is promised to do in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tools.placement_modes import Run, overlapped, play
from tools.placement_workloads import measured_workload, workloads
from tools.placement_world import JUDGE, SAMPLER, Batch, Engine, Machine, Network, split_phase, turns_phase
from tools.simulate_placement import main
from yatt_jax.controller.placement import Limits, Placement

# A model of 500 numbers: a step reads 1000 bytes in a second, and a token takes 1000 operations.
TOY = Network(500, 0.0)
SIMPLE = Machine(
    devices=4,
    bandwidth=1000.0,
    flops=1000.0,
    memory=5000.0,
    host_link=500.0,
    device_link=1000.0,
    overhead=0.0,
    actor=TOY,
    judge=Network(500, 0.0),
    prompt=2,
    template=0,
    wake=0.0,
)
PAIR = Placement(((SAMPLER, 2), (JUDGE, 2)))


def roomy(machine: Machine) -> Machine:
    """Slots for every row: keys and values of a token are a billionth of a byte."""
    small = Network(500, 1e-9)
    return dataclasses.replace(machine, actor=small, judge=dataclasses.replace(small, parameters=500.0))


def engine(machine: Machine, devices: int, prompts: list[int], lengths: list[int], pace: float = 1.0) -> Engine:
    made = Engine(machine, machine.actor, devices, np.array(prompts), np.array(lengths), pace, 0.0)
    for row in range(len(prompts)):
        made.add(0.0, row)
    return made


def run(made: Engine) -> dict[int, float]:
    left = {}
    while made.next < np.inf:
        left |= {row: made.now for row in made.chunk()}
    return left


def test_an_engine_decodes_at_the_pace_of_its_memory() -> None:
    machine = roomy(SIMPLE)
    # One row: two tokens of prompt in two seconds, then five steps of a second each.
    assert run(engine(machine, 1, [2], [5])) == {0: pytest.approx(7.0)}
    # Four rows on two devices: two whole prompts each; with two rows a step multiplies for two seconds.
    assert run(engine(machine, 2, [2] * 4, [5] * 4)) == {row: pytest.approx(4 + 5 * 2) for row in range(4)}
    assert run(engine(machine, 2, [2] * 4, [5] * 4, pace=1.5)) == {row: pytest.approx(1.5 * 14) for row in range(4)}


def test_rows_leave_when_the_host_looks() -> None:
    left = run(engine(roomy(SIMPLE), 1, [2] * 9, [1] * 8 + [40]))
    chunks = [2 * 9 + 16 * 9, 16, 8]  # nine rows for a chunk of 16 steps, then one row alone
    assert left[0] == pytest.approx(chunks[0])
    assert left[8] == pytest.approx(sum(chunks))


def test_rows_wait_for_slots() -> None:
    machine = dataclasses.replace(SIMPLE, actor=Network(500, 4000 / (2 + 8192)))  # room for one row
    assert machine.slots(machine.actor) == 1
    left = run(engine(machine, 1, [2, 2], [16, 16]))
    assert left[1] == pytest.approx(2 * left[0], rel=0.02)


def test_a_split_overlaps_and_turns_do_not() -> None:
    machine = roomy(SIMPLE)
    batch = Batch(
        prompts=np.full(2, 2),
        lengths=np.array([16, 32]),
        verdicts=np.array([16, 16]),
        latency=np.array([0.0, 0.0]),
        again=np.array([-1, -1]),
        first=2,
    )
    # Weights come in a second; prompts take 2, every step 1: rows leave at 19 and 35. The judge reads 18 tokens, writes
    # 16 until 53, reads the other 34 and writes 16.
    phase = split_phase(machine, batch, PAIR)
    assert phase.seconds == pytest.approx(19 + 18 + 16 + 34 + 16)
    assert phase.outside <= 0
    # Turns: the judge's weights come from the host in two seconds; two devices read 26 tokens each on average.
    assert turns_phase(machine, batch) == pytest.approx(35 + 2 + 26 + 16)
    late = dataclasses.replace(batch, latency=np.array([0.0, 100.0]))
    phase = split_phase(machine, late, PAIR)
    assert (phase.seconds, phase.outside) == pytest.approx((135, 100), rel=0.01)


def test_replaced_rows_are_sampled_and_not_trained_on() -> None:
    machine = roomy(SIMPLE)
    batch = Batch(
        prompts=np.full(3, 2),
        lengths=np.array([16, 16, 16]),
        verdicts=np.array([8, 8, 8]),
        latency=np.zeros(3),
        again=np.array([-1, 2, -1]),
        first=2,
    )
    once = dataclasses.replace(batch, again=np.array([-1, -1, -1]))
    assert split_phase(machine, batch, PAIR).seconds > 1.8 * split_phase(machine, once, PAIR).seconds
    assert turns_phase(machine, batch) > 1.8 * turns_phase(machine, once)
    assert split_phase(machine, batch, PAIR).loads[SAMPLER].rows == 3
    assert batch.tokens == 2 * 18


def test_workloads_replace_the_share_that_they_say() -> None:
    machine = Machine(rows=100, devices=8)
    batch = workloads(10)["dynamic sampling"].batch(machine, 0, 0, 0)
    assert batch.first == 800
    assert len(batch.lengths) == 800 + 320 + 128 + 51
    targets = batch.again[batch.again >= 0]
    assert sorted(targets) == list(range(800, len(batch.lengths)))
    assert np.median(batch.lengths) == pytest.approx(1024, rel=0.1)


def test_devices_of_their_own_overlap_steps_by_hand() -> None:
    assert overlapped([3, 3, 3], [2, 2, 2], staleness=0) == 15
    assert overlapped([3, 3, 3], [2, 2, 2], staleness=1) == 11  # only the last update is waited for
    assert overlapped([1, 1, 1], [4, 4, 4], staleness=1) == 13
    assert overlapped([1, 9, 1], [4, 4, 4], staleness=1) == 1 + 9 + 4 + 4


def test_the_lengths_of_a_run_are_replayed(tmp_path: Path) -> None:
    records = [{"step": step, "split": "train", "length": 10 * step + i} for step in (1, 2) for i in range(3)]
    records.append({"step": 1, "split": "eval", "length": 999})
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    workload = measured_workload(tmp_path, 64)
    assert workload.steps == 2
    assert set(workload.batch(Machine(), 1, 0, 0).lengths) == {20, 21, 22}
    with pytest.raises(ValueError, match="no training samples"):
        measured_workload(tmp_path / "none", 64)


def play_one(name: str, seed: int, steps: int = 40) -> Run:
    workload = workloads(steps)[name]
    return play(Machine(rows=128), workload, 2 if workload.pace else 1, seed, Limits(), apart=False)


def check(name: str, run: Run) -> None:
    """What issue 7 asks for."""
    adaptive = run.adaptive.sum()
    assert adaptive <= 1.05 * run.oracle.sum()
    drifts = workloads(2)[name].drifts
    if drifts:
        assert run.fixed[run.best_fixed].sum() >= 1.15 * adaptive
    else:
        assert run.moves_a_step <= 0.1
    if name == "dynamic sampling":
        assert run.colocated.sum() >= 1.24 * adaptive


def test_a_stationary_workload_is_left_alone() -> None:
    check("stationary", play_one("stationary", 0, steps=20))


def test_drifting_lengths_are_followed() -> None:
    check("lengths", play_one("lengths", 0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", list(workloads(2)))
def test_promises(name: str, seed: int) -> None:
    check(name, play_one(name, seed, steps=60))


def test_the_command_writes_figures_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "3", "--rows", "8", "--host", "4", "--devices", "4", "8", "--only", "slow host"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:]] == ["4", "8"]
    (written,) = tmp_path.glob("*.json")
    found = json.loads(written.read_text())["found"]
    assert [figures["devices"] for figures in found] == [4, 8]
    assert found[0]["disaggregated"]["1"]["whole step"] > 0
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "placement-slow-host.svg",
        "placement-slow-host-shares.svg",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "calm"], "--only 'calm': no such workload"), (["--devices", "12"], "a multiple of --host 8")],
)
def test_what_cannot_be_played(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
