"""Packs of patches and frames: what is in them, and how few programs a stream of odd sizes needs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compilations import BACKEND, compilations
from yatt_jax.data.media.packs import Ladder, feature_index, fill, plan
from yatt_jax.types import MediaItem


def item(places: int, tokens: int, width: int = 3, seed: int = 0) -> MediaItem:
    values = np.random.default_rng([seed, places]).normal(size=(places, width)).astype(np.float32)
    return MediaItem("image", (1, 1, places), tokens, 0.0, str(seed), lambda: values, lambda: ("", b""), values)


def test_ladders():
    assert Ladder.up_to(1000).sizes == (62, 250, 1000)
    assert Ladder.up_to(1000, rungs=2, ratio=2, align=64).sizes == (512, 1024)
    assert Ladder.up_to(3, rungs=4).sizes == (1, 3)
    assert Ladder.up_to(4, align=4).sizes == (4,)
    assert [Ladder((4, 16)).size(n) for n in (0, 1, 4, 5, 16)] == [4, 4, 4, 16, 16]
    with pytest.raises(ValueError, match="17 places, and the largest pack has 16"):
        Ladder((4, 16)).size(17)
    for sizes, align in (((), 1), ((4, 4), 1), ((8, 4), 1), ((4, 6), 4), ((4,), 0), ((0, 4), 1)):
        with pytest.raises(ValueError, match="expected"):
            Ladder(sizes, align)


def test_every_item_is_in_one_pack_that_holds_it():
    dice = np.random.default_rng(0)
    ladder = Ladder((64, 256, 1024), 4)
    for _ in range(50):
        lengths = dice.integers(1, 1025, int(dice.integers(1, 30))).tolist()
        packs = plan(lengths, ladder)
        assert sorted(itertools.chain(*(members for _, members in packs))) == list(range(len(lengths)))
        for size, members in packs:
            used = sum(-(-lengths[i] // 4) * 4 for i in members)
            assert used <= size
            assert size == min(s for s in ladder.sizes if s >= used)
    assert plan([], ladder) == []
    with pytest.raises(ValueError, match="1028 places, and the largest pack has 1024"):
        plan([3, 1025], ladder)


def test_fill():
    items = [item(5, 1), item(9, 2), item(3, 1)]
    packs = fill(items, Ladder((8, 12), 4))
    assert [len(pack.values) for pack in packs] == [12, 12]
    assert [pack.members for pack in packs] == [(1,), (0, 2)]
    assert [pack.starts for pack in packs] == [(0,), (0, 8)]
    assert packs[1].item.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0]
    np.testing.assert_array_equal(packs[1].values[:5], items[0].values)
    np.testing.assert_array_equal(packs[1].values[8:11], items[2].values)
    assert not packs[1].values[packs[1].item == 0].any()


def test_features_go_to_every_row_that_names_their_item():
    items = [item(8, 2), item(12, 3)]
    index = feature_index((3, 6), [(0, 1, 0), (1, 1, 0), (1, 3, 1), (2, 0, 1)], items, {0: 4, 1: 0})
    assert index.tolist() == [[-1, 4, 5, -1, -1, -1], [-1, 4, 5, 0, 1, 2], [0, 1, 2, -1, -1, -1]]


def test_a_stream_of_odd_sizes_compiles_six_programs_at_most():
    """Batches of images of 1 to 1,024 patches and audio of 3 to 3,000 frames, 1,000 of each."""
    dice = np.random.default_rng(0)
    patches, frames = Ladder.up_to(1024, align=4), Ladder.up_to(3000, align=8)

    @jax.jit
    def tower(values: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.where((number > 0)[:, None], values, 0).sum(0)

    def stream(count: int) -> None:
        done = 0
        while done < count:
            batch = min(int(dice.integers(1, 17)), count - done)
            done += batch
            for ladder, least in ((patches, 1), (frames, 3)):
                lengths = dice.integers(least, ladder.sizes[-1] + 1, batch).tolist()
                width = 4 if ladder is patches else 2
                for pack in fill([item(n, 1, width, i) for i, n in enumerate(lengths)], ladder):
                    tower(pack.values, pack.item)

    with compilations() as compiled:
        stream(1000)
    assert compiled.count(BACKEND) <= 6
    with compilations() as compiled:
        stream(200)
    assert compiled == []
