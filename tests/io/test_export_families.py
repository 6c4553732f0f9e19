"""Import and export are inverse for every family, and stock transformers computes what we compute."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from yatt_jax.io.export import save_folder
from yatt_jax.io.hf import load_model, read_folder
from yatt_jax.models.build import Kind, Model, build
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.types import Inputs, Params

HEADS: dict[Kind, str] = {"lm": "ForCausalLM", "value": "ForTokenClassification", "reward": "ForSequenceClassification"}
AUTO: dict[Kind, Any] = {
    "lm": transformers.AutoModelForCausalLM,
    "value": transformers.AutoModelForTokenClassification,
    "reward": transformers.AutoModelForSequenceClassification,
}
PROMPT = [5, 17, 3, 80, 41, 9, 33]
NEW = 9


def moved(params: Params) -> Params:
    """Other parameters, so that nothing is equal for having been copied."""
    return jax.tree.map(lambda x: x * 0.875 + 0.01, params)


def stock(folder, kind: Kind) -> Any:
    model, info = AUTO[kind].from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def assert_same(a: Params, b: Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def greedy(model: Model, params: Params) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt, and its greedy continuation, each token from a fresh forward pass."""
    length = len(PROMPT)

    @jax.jit
    def run(params):
        module = model.bind(params)
        positions = jnp.arange(length + NEW)[None]

        def logits(tokens):
            hidden, _ = module(Inputs(tokens, positions, jnp.ones_like(positions)))
            return module.logits(hidden)[0]

        def step(i, tokens):
            return tokens.at[0, i].set(logits(tokens)[i - 1].argmax().astype(tokens.dtype))

        start = jnp.zeros((1, length + NEW), jnp.int32).at[0, :length].set(jnp.asarray(PROMPT))
        tokens = jax.lax.fori_loop(length, length + NEW, step, start)
        return logits(tokens)[:length], tokens[0, length:]

    found, tokens = run(params)
    return np.asarray(found), np.asarray(tokens).tolist()


def test_stock_logits_and_greedy_output(family_case, tiny, tmp_path, one_device):
    made = tiny(family_case)
    model, params = load_model(made.folder, "lm", one_device)
    params = moved(params)
    values = read_folder(made.folder).hf_config
    theirs = stock(save_folder(tmp_path / "out", model, params, values, None, dtype="float32"), "lm")
    logits, tokens = greedy(model, params)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        np.testing.assert_allclose(theirs(ids).logits[0].numpy(), logits, atol=1e-4)
    theirs.generation_config.eos_token_id = None
    assert theirs.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist() == tokens
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("kind", ["lm", "value", "reward"])
def test_ours_to_theirs_and_back(kind, family_case, tiny, tmp_path, one_device):
    if kind == "value" and family_case == "gemma3":
        made = tiny(family_case)  # a critic with a fresh head: transformers has no class for one
    else:
        made = tiny(family_case, HEADS[kind], **({} if kind == "lm" else {"num_labels": 1}))
    for dtype in ("float32", "bfloat16"):
        model, params = load_model(made.folder, kind, one_device, dtype=dtype)
        params = jax.tree.map(lambda x: (x * 0.875 + 0.01).astype(x.dtype), params)
        out = tmp_path / dtype
        values = read_folder(made.folder).hf_config
        with (
            pytest.warns(match="gemma3_text critic")
            if kind == "value" and family_case == "gemma3"
            else contextlib.nullcontext()
        ):
            save_folder(out, model, params, values, None, dtype=dtype)
        again, read = load_model(out, kind, one_device, dtype=dtype)
        assert dataclasses.replace(again.config, dtype=model.config.dtype) == model.config
        assert_same(read, params)


@pytest.mark.parametrize("kind", ["lm", "value", "reward"])
def test_theirs_to_ours_and_back(kind, family_case, tiny, tmp_path):
    """Read into shards of eight devices, and written in several files."""
    if kind == "value" and family_case == "gemma3":
        pytest.skip("transformers has no token classifier for gemma3_text")
    made = tiny(family_case, HEADS[kind], **({} if kind == "lm" else {"num_labels": 1}))
    train, _ = make_partitions(Split(1, 4, 2), Split(-1, 1, 2))
    model, params = load_model(made.folder, kind, train)
    out = tmp_path / "out"
    save_folder(out, model, params, read_folder(made.folder).hf_config, None, dtype="float32", shard_bytes=20_000)
    ours: dict[str, np.ndarray] = {}
    for file in out.glob("model-*.safetensors"):
        ours |= load_file(file)
    theirs = load_file(made.folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        np.testing.assert_array_equal(ours[name], tensor)
    assert type(stock(out, kind)) is type(made.model)


@pytest.mark.parametrize("case_tied", ["llama-tied-llama3", "gemma3"])
def test_tied_weights_that_have_become_unequal(case_tied, tiny, tmp_path, one_device):
    """config.json of the source says tied, and the model has an output matrix of its own."""
    made = tiny(case_tied)
    values = read_folder(made.folder).hf_config
    tied, params = load_model(made.folder, "lm", one_device)
    assert tied.config.tied
    once = save_folder(tmp_path / "tied", tied, params, values, None, dtype="float32")
    assert "lm_head.weight" not in load_file(once / "model.safetensors")
    assert read_folder(once).hf_config["tie_word_embeddings"] is True

    untied = build("lm", dataclasses.replace(tied.config, tied=False))
    params = params | {"unembedding": params["decoder"]["embedding"] * 0.5 + 0.1}
    out = save_folder(tmp_path / "untied", untied, params, values, None, dtype="float32")
    assert read_folder(out).hf_config["tie_word_embeddings"] is False
    logits, _ = greedy(untied, params)
    theirs = stock(out, "lm")
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    with torch.no_grad():
        np.testing.assert_allclose(theirs(torch.tensor([PROMPT])).logits[0].numpy(), logits, atol=1e-4)
    again, read = load_model(out, "lm", one_device)
    assert not again.config.tied
    assert_same(read, params)
