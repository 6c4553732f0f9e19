"""The collectives of a move: which, how large, and in pieces."""

from __future__ import annotations

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.bench_repartition import SIZES, Move, analyse, collectives, live, main, moves
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel.moves import PIECE, Step, compile_move, mover, shard_bytes, steps
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.parallel.topology import described_devices

SMALL = build("lm", DecoderConfig(vocab=48, hidden=32, layers=2, heads=8, kv_heads=4, head_dim=4, mlp=64))
PAIRS = [
    (Split(1, 4, 2), Split(4, 1, 2)),
    (Split(1, 8, 1), Split(8, 1, 1)),
    (Split(2, 2, 2), Split(2, 1, 4)),
    (Split(1, 8, 1), Split(1, 1, 8)),
    (Split(1, 4, 2), Split(1, 1, 8)),
    (Split(1, 1, 8), Split(4, 1, 2)),
    (Split(1, 8, 1), Split(4, 1, 2)),
]


def of(train: Split, rollout: Split) -> list[Move]:
    partitions = make_partitions(train, rollout, jax.devices(), kv_heads=(SMALL.config.kv_heads,))
    return list(moves(SMALL, *partitions))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((("f",), ("t",)), ((), ("t",)), [Step("gather", ("f",), 0)]),
        (((), ("t",)), (("f",), ("t",)), [Step("cut", ("f",), 0)]),
        ((("g", "f"), ()), ((), ()), [Step("gather", ("g", "f"), 0)]),
        ((("g", "f"), ()), (("g",), ()), [Step("gather", ("f",), 0)]),
        ((("f",), ("t",)), ((), ("t", "f")), [Step("exchange", ("f",), 1, 0)]),
        ((("g", "f"), ()), ((), ("f",)), [Step("exchange", ("f",), 1, 0), Step("gather", ("g",), 0)]),
        # An axis in the middle cannot be handed over before the one inside it.
        ((("g", "f"), ()), ((), ("g",)), [Step("gather", ("f",), 0), Step("exchange", ("g",), 1, 0)]),
        ((("f", "g"),), (("g", "f"),), [Step("gather", ("f", "g"), 0), Step("cut", ("g",), 0), Step("cut", ("f",), 0)]),
        ((("f",), ()), ((), ("t",)), [Step("cut", ("t",), 1), Step("gather", ("f",), 0)]),
    ],
)
def test_steps(source: tuple[tuple[str, ...], ...], target: tuple[tuple[str, ...], ...], expected: list[Step]) -> None:
    assert steps(source, target) == expected


@pytest.mark.parametrize(("train", "rollout", "piece"), [(*PAIRS[0], 1), (*PAIRS[2], 3000), (*PAIRS[6], 1)])
def test_moves_in_pieces_keep_bits(train: Split, rollout: Split, piece: int) -> None:
    looped = 0
    for move in of(train, rollout):
        numbers = np.random.default_rng(0).standard_normal(move.leaf.shape).astype(np.float32)
        placed = jax.device_put(numbers, move.source)
        function = mover(move.leaf.shape, 4, move.source, move.target, piece)
        looped += "while" in function.lower(placed).as_text()
        moved = function(placed)
        assert moved.sharding.is_equivalent_to(move.target, moved.ndim)
        np.testing.assert_array_equal(moved, numbers)
    assert looped


@pytest.mark.parametrize(("train", "rollout"), PAIRS[:2])
@pytest.mark.parametrize("piece", [PIECE, 8192])
def test_what_only_drops_fsdp_is_gathered_over_fsdp_alone(train: Split, rollout: Split, piece: int) -> None:
    checked = 0
    for move in of(train, rollout):
        assert move.drops_fsdp_only
        found = collectives(compile_move(move.leaf, move.source, move.target, piece).as_text() or "")
        if move.way == "rollout -> train":
            assert found == {}  # every device cuts its part out of what it holds
            continue
        block = shard_bytes(move.leaf.shape, 4, move.target)
        assert set(found) == {"all-gather"}
        assert found["all-gather"] == block if block <= piece else found["all-gather"] <= piece
        assert block * rollout.tensor == move.whole
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize(
    ("train", "rollout", "piece"), [*((*pair, PIECE) for pair in PAIRS[2:]), (*PAIRS[2], 1), (*PAIRS[6], 1)]
)
def test_no_move_gathers_more_than_its_new_block(train: Split, rollout: Split, piece: int) -> None:
    for move in of(train, rollout):
        found = collectives(compile_move(move.leaf, move.source, move.target, piece).as_text() or "")
        assert set(found) <= {"all-gather", "all-to-all"}, move
        assert all(size <= shard_bytes(move.leaf.shape, 4, move.target) for size in found.values()), move


def test_collectives_are_read_from_the_program_text() -> None:
    text = """
      %a = bf16[2,4096,256]{2,1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={1}
      %b = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%y), channel_id=2
      %c = f32[16,8]{1,0} all-gather-done(%b)
      %d = (f32[2]{0}, f32[2]{0}) all-to-all(%p, %q), channel_id=3
      %e = f32[9]{0} copy(%all-gather), metadata={op_name="all-gather"}
    """
    assert collectives(text) == {"all-gather": 2 * 4096 * 256 * 2, "all-to-all": 8}


def test_the_benchmark_runs_on_the_devices_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    train, rollout = make_partitions(Split(1, 4, 2), Split(4, 1, 2), jax.devices())
    found = {row["what"]: row for row in live(SMALL, train, rollout, runs=1)}
    assert set(found) == {"train -> rollout", "rollout -> train", "park", "fetch"}
    norms = (2 * SMALL.config.layers + 1) * SMALL.config.hidden
    # Of its half of the matrices, each device had a quarter.
    assert found["train -> rollout"]["bytes"] == 8 * 4 * (SMALL.parameter_count - norms) // 2 * 3 // 4
    assert found["train -> rollout"]["shared"] == 3
    assert found["rollout -> train"]["bytes"] == 0
    assert all(row["seconds"] > 0 for row in found.values())
    assert "GiB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v9z:1x1"], "--topology=v9z:1x1"),
        (["--train=1,4", "--rollout=4,2"], "--train takes data,fsdp,tensor"),
        (["--train=1,3,2", "--rollout=4,2"], "parallel.train"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize(
    ("topology", "train", "rollout"),
    [
        ("v5e:2x4", Split(1, 8, 1), Split(8, 1, 1)),
        ("v5e:2x4", Split(1, 4, 2), Split(4, 1, 2)),
        ("v5e:2x4", Split(2, 2, 2), Split(2, 1, 4)),
        ("v5p:2x2x4", Split(1, 8, 2), Split(8, 1, 2)),
        ("v5p:2x2x4", Split(1, 4, 4), Split(4, 1, 4)),
        ("v5p:2x2x4", Split(1, 16, 1), Split(4, 1, 4)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tpu_memory_of_every_move_of_an_8b_model(topology: str, train: Split, rollout: Split, dtype: str) -> None:
    model = build("lm", SIZES["8b"], dtype)
    partitions = make_partitions(train, rollout, described_devices(topology), kv_heads=(8,))
    checked = 0
    for move in moves(model, *partitions):
        memory = analyse(move)
        size = jnp.dtype(dtype).itemsize
        block = shard_bytes(move.leaf.shape, size, move.target)
        assert memory.output == block, move
        assert memory.input == shard_bytes(move.leaf.shape, size, move.source), move
        # What is moved at a time: a piece, or a layer where that is larger.
        piece = max(PIECE, block // move.source.shard_shape(move.leaf.shape)[0])
        if move.drops_fsdp_only:
            assert memory.temporary <= 1.01 * piece, move
            assert set(memory.collectives) <= {"all-gather"}, move
            assert max(memory.collectives.values(), default=0) <= piece, move
            checked += 1
        else:
            stacked = len(move.leaf.shape) > 2
            assert memory.temporary <= min(2.01 * block, 3 * piece if stacked else math.inf), move
        if rollout.tensor > 1:
            assert memory.output + memory.temporary < move.whole, move
    assert checked or train.tensor != rollout.tensor
