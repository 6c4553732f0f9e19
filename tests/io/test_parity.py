"""Hidden states, logits and gradients equal transformers on torch, for every family and rotary embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from yatt_jax.io.hf import load_model, read_folder
from yatt_jax.models.families import family
from yatt_jax.models.names import flatten, leaves_of
from yatt_jax.types import Inputs

T = 20
# Rows: unpadded, padded on the left by 6, padded on the right by 7, and documents of 8, 5 and 4 tokens with padding.
DOCUMENTS = [[(0, 20)], [(6, 20)], [(0, 13)], [(0, 8), (8, 13), (13, 17)]]


def rows() -> tuple[Inputs, np.ndarray, np.ndarray]:
    """Inputs, target ids and token weights."""
    rng = np.random.default_rng(0)
    shape = (len(DOCUMENTS), T)
    tokens = rng.integers(1, 96, shape)  # 0 is the padding id, whose embedding torch does not train
    positions, segments = np.zeros(shape, int), np.zeros(shape, int)
    for row, documents in enumerate(DOCUMENTS):
        for number, (start, stop) in enumerate(documents, 1):
            positions[row, start:stop] = np.arange(stop - start)
            segments[row, start:stop] = number
    weights = rng.uniform(0.2, 1.0, shape) * (segments > 0)
    targets = rng.integers(0, 96, shape)
    return Inputs(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments)), targets, weights / weights.sum()


def torch_rows(model, inputs: Inputs, targets: np.ndarray, weights: np.ndarray):
    """Hidden states and logits of transformers; gradients of the weighted loss are left on the parameters."""
    model.zero_grad()
    width = model.config.hidden_size
    hidden = np.zeros((*targets.shape, width), np.float32)
    logits = np.zeros((*targets.shape, 96), np.float32)

    def run(row: int, start: int, stop: int, mask=None) -> None:
        ids = torch.tensor(np.asarray(inputs.tokens)[row : row + 1, start:stop])
        positions = torch.tensor(np.asarray(inputs.positions)[row : row + 1, start:stop])
        out = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False)
        logp = torch.log_softmax(out.logits[0], -1).gather(1, torch.tensor(targets[row, start:stop, None]))[:, 0]
        (-(logp * torch.tensor(weights[row, start:stop], dtype=torch.float32)).sum()).backward()
        hidden[row, start:stop] = out.hidden_states[-1][0].detach()
        logits[row, start:stop] = out.logits[0].detach()

    for row, documents in enumerate(DOCUMENTS):
        if len(documents) == 1:  # with its padding, as transformers is given it
            mask = torch.tensor(np.asarray(inputs.segments)[row : row + 1] > 0).long()
            run(row, 0, T, mask)
        else:
            for start, stop in documents:
                run(row, start, stop)
    return hidden, logits


def test_hidden_states_logits_and_gradients(case, tiny, one_device):
    made = tiny(case)
    model, params = load_model(made.folder, "lm", one_device)
    inputs, targets, weights = rows()

    def loss(params):
        module = model.bind(params)
        hidden, _ = module(inputs)
        logits = module.logits(hidden)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -(logp * weights).sum(), (hidden, logits)

    (_, (hidden, logits)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    torch_hidden, torch_logits = torch_rows(made.model, inputs, targets, weights)
    real = np.asarray(inputs.segments) > 0
    assert np.abs(torch_logits[real]).max() > 1
    np.testing.assert_allclose(np.asarray(hidden)[real], torch_hidden[real], atol=1e-4)
    np.testing.assert_allclose(np.asarray(logits)[real], torch_logits[real], atol=1e-4)
    assert np.isfinite(np.asarray(hidden)).all()  # padding is finite too, or gradients of later layers would not be

    expected = {name: p.grad.numpy() for name, p in made.model.named_parameters()}
    flat = dict(flatten(grads))
    leaves = leaves_of(family(read_folder(made.folder).model_type).names, model.abstract)
    assert {names[0] for leaf in leaves for names in leaf.names} == set(expected)
    for leaf in leaves:
        grad = np.asarray(flat[leaf.path])
        for layer, names in enumerate(leaf.names):
            ours = leaf.layout.to_hf(grad[layer] if leaf.stacked else grad)
            np.testing.assert_allclose(ours, expected[names[0]], atol=1e-4, err_msg=names[0])
            if names[0].endswith("k_proj.bias"):
                continue  # without rotation a key bias shifts all scores of a query alike, so its gradient is small
            assert np.abs(expected[names[0]]).max() > 1e-4, f"{names[0]} has no gradient to compare"
