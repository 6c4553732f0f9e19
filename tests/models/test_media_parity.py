"""Multimodal models equal transformers on torch: features, hidden states, logits and every gradient.

Rows with none, one and several items of different sizes stand in one batch; transformers is given them one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.models import media_models
from tests.models.media_models import CASES, VOCAB, Tiny
from yatt_jax.io.hf import load_model, read_folder
from yatt_jax.models.build import Model
from yatt_jax.models.families import family
from yatt_jax.models.media_items import Item
from yatt_jax.models.names import flatten, leaves_of
from yatt_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model here and there, and rows for it."""

    name: str
    made: Tiny
    model: Model
    params: Params
    rows: list[tuple[list[int], list[Item]]]

    @property
    def items(self) -> list[Item]:
        """Each item once, in the order of the rows."""
        return list({id(item): item for _, items in self.rows for item in items}.values())


@pytest.fixture(scope="module", params=list(CASES))
def loaded(request, tmp_path_factory, one_device) -> Loaded:
    made = media_models.make(request.param, tmp_path_factory.mktemp(request.param))
    model, params = load_model(made.folder, "lm", one_device)
    rng = np.random.default_rng(1)
    rows = [media_models.row(model.config, parts, rng) for parts in CASES[request.param].parts(model.config, rng)]
    return Loaded(request.param, made, model, params, rows)


def test_features(loaded):
    inputs = media_models.inputs_of(loaded.model.config, loaded.rows)
    media = inputs.media
    assert media is not None
    run = jax.jit(lambda params, media: loaded.model.bind(params).decoder.features(media))
    found = np.asarray(run(loaded.params, media))[0]
    seen: list[int] = []
    ours = []
    for b, (_, items) in enumerate(loaded.rows):
        index = np.asarray(media.index[b])
        place = index[index > 0] - 1
        for item in items:
            count = media_models.features(loaded.model.config, item)
            if id(item) not in seen:
                ours.append(found[place[:count]])
                seen.append(id(item))
            place = place[count:]
    expected = CASES[loaded.name].features(loaded.made.model, loaded.items)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(np.concatenate(ours), expected, atol=1e-4)


def torch_rows(loaded: Loaded, targets: np.ndarray, weights: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Hidden states and logits of transformers; gradients of the weighted loss are left on the parameters."""
    model = loaded.made.model
    model.zero_grad()
    hidden, logits = [], []
    for b, (tokens, items) in enumerate(loaded.rows):
        ids = torch.tensor([tokens])
        given = CASES[loaded.name].given(items, ids)
        out = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, use_cache=False, **given)
        n = len(tokens)
        logp = torch.log_softmax(out.logits[0], -1).gather(1, torch.tensor(targets[b, :n, None]))[:, 0]
        (-(logp * torch.tensor(weights[b, :n], dtype=torch.float32)).sum()).backward()
        hidden.append(out.hidden_states[-1][0].detach().numpy())
        logits.append(out.logits[0].detach().numpy())
    return hidden, logits


@pytest.mark.slow
@pytest.mark.parametrize("packs", [1, 2])
def test_hidden_states_logits_and_gradients(loaded, packs):
    inputs = media_models.inputs_of(loaded.model.config, loaded.rows, packs=packs)
    shape = inputs.tokens.shape
    rng = np.random.default_rng(2)
    targets = rng.integers(0, VOCAB, shape)
    weights = rng.uniform(0.2, 1.0, shape) * (np.asarray(inputs.segments) > 0)
    weights /= weights.sum()

    def loss(params: Params, inputs: Any) -> Any:
        module = loaded.model.bind(params)
        hidden, _ = module(inputs)
        logits = module.logits(hidden)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -(logp * weights).sum(), (hidden, logits)

    (_, (hidden, logits)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(loaded.params, inputs)
    torch_hidden, torch_logits = torch_rows(loaded, targets, weights)
    for b, (tokens, _) in enumerate(loaded.rows):
        assert np.abs(torch_logits[b]).max() > 1
        np.testing.assert_allclose(hidden[b, : len(tokens)], torch_hidden[b], atol=1e-4)
        np.testing.assert_allclose(logits[b, : len(tokens)], torch_logits[b], atol=1e-4)
    assert np.isfinite(np.asarray(hidden)).all()

    expected = {name: p.grad for name, p in loaded.made.model.named_parameters()}
    flat = dict(flatten(grads))
    leaves = leaves_of(family(read_folder(loaded.made.folder).model_type).names, loaded.model.abstract)
    compared = set()
    for leaf in leaves:
        grad = np.asarray(flat[leaf.path])
        for layer, spellings in enumerate(leaf.names):
            name = next(n for n in spellings if n in expected)
            compared.add(name)
            ours = leaf.layout.to_hf(grad[layer] if leaf.stacked else grad)
            if expected[name] is None:
                np.testing.assert_array_equal(ours, 0, err_msg=name)
                continue
            theirs = expected[name].numpy()
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=name)
            if not name.endswith("k_proj.bias"):
                assert np.abs(theirs).max() > 1e-4, f"{name} has no gradient to compare"
    assert compared == set(expected)
