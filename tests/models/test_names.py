"""Name tables: layouts and their inverse, whole and by slices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.models import media_models
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import FAMILIES
from yatt_jax.models.names import Layout, flatten, leaves_of, unflatten

CONFIG = DecoderConfig(vocab=12, hidden=8, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=10)


def test_layout_by_hand():
    # Two heads of two rows each; our kernel is [d, head, row of the head].
    hf = np.array([[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]])
    layout = Layout.parse("(h k) d -> d h k")
    ours = layout.from_hf(hf, (3, 2, 2))
    assert ours[1].tolist() == [[1, 11], [21, 31]]
    assert layout.hf_shape((3, 2, 2)) == (4, 3)
    np.testing.assert_array_equal(layout.to_hf(ours), hf)


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ("v d -> v d", (6, 4)),
        ("(h k) d -> d h k", (4, 6, 2)),
        ("d (h k) -> h k d", (6, 2, 4)),
        ("(j k) -> j k", (6, 2)),
        ("f d -> d f", (4, 6)),
        ("y -> y", (6,)),
    ],
)
def test_layout_slices_agree_with_the_whole(pattern, shape):
    layout = Layout.parse(pattern)
    ours = np.arange(np.prod(shape)).reshape(shape)
    hf = layout.to_hf(ours)
    assert hf.shape == layout.hf_shape(shape)
    np.testing.assert_array_equal(layout.from_hf(hf, shape), ours)
    cuttable = shape.index(6)
    for start, stop in [(0, 3), (2, 5), (3, 6)]:
        slices = tuple(slice(start, stop) if dim == cuttable else slice(0, size) for dim, size in enumerate(shape))
        part = ours[slices]
        np.testing.assert_array_equal(layout.from_hf(hf[layout.hf_slices(slices, shape)], part.shape), part)


def test_layout_refuses_to_cut_inside_a_head():
    with pytest.raises(ValueError, match="cannot be cut"):
        Layout.parse("(h k) d -> d h k").hf_slices((slice(0, 4), slice(0, 2), slice(0, 1)), (4, 2, 2))


def test_layout_sides_must_agree():
    with pytest.raises(ValueError, match="same dimensions"):
        Layout.parse("(h k) d -> d h")


TOWERS = {case.config().model_type: case for case in media_models.CASES.values()}


@pytest.mark.parametrize("model_type", list(FAMILIES))
@pytest.mark.parametrize("kind", ["lm", "value", "reward"])
def test_a_table_names_every_parameter_once(model_type, kind):
    gemma = model_type == "gemma3_text"
    towers = FAMILIES[model_type].from_hf(TOWERS[model_type].config().to_dict()) if model_type in TOWERS else None
    config = towers or dataclasses.replace(
        CONFIG,
        tied=False,
        qkv_bias=model_type != "mistral",
        out_bias=model_type in ("llama", "qwen3"),
        mlp_bias=model_type == "llama",
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        post_norms=gemma,
    )
    model = build(kind, dataclasses.replace(config, tied=False))
    leaves = leaves_of(FAMILIES[model_type].names, model.abstract)
    assert [leaf.path for leaf in leaves] == [path for path, _ in flatten(model.abstract)]
    names = [spelling[0] for leaf in leaves for spelling in leaf.names]
    assert len(names) == len(set(names))
    expected = {"lm": "lm_head.weight", "value": "score.bias", "reward": "score.weight"}[kind]
    assert any(name.endswith(expected) for name in names)
    assert any(name.endswith("model.layers.1.self_attn.q_proj.weight") for name in names)


def test_a_parameter_that_the_family_does_not_know():
    model = build("lm", dataclasses.replace(CONFIG, mlp_bias=True))
    with pytest.raises(ValueError, match="no row for the parameter decoder/layers/mlp/down/bias"):
        leaves_of(FAMILIES["mistral"].names, model.abstract)


def test_flatten_and_back():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert dict(flatten(tree)) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert unflatten(dict(flatten(tree))) == tree
