"""Reading Hugging Face folders: what fits, what does not, heads, and shardings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from yatt_jax.io.hf import CheckpointError, load_model, read_folder
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.types import Inputs

METADATA = {"format": "pt"}


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy of the tied llama that a test may spoil."""
    return Path(shutil.copytree(tiny("llama-tied-llama3").folder, tmp_path / "model"))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", METADATA)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def split(folder: Path, parts: int) -> None:
    """Turns the one file into several with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, folder / file, METADATA)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_read_folder_reads_no_weights(folder):
    (folder / "model.safetensors").unlink()
    read = read_folder(str(folder))
    assert (read.model_type, read.architectures) == ("llama", ("LlamaForCausalLM",))
    assert (read.config.vocab, read.config.layers, read.config.ropes[0].kind) == (96, 3, "llama3")
    assert read.hf_config["hidden_size"] == 32
    assert read.generation_config["eos_token_id"] == 2


def test_several_files_equal_one(folder, one_device):
    seen = []
    _, one = load_model(folder, "lm", one_device, progress=lambda *args: seen.append(args))
    assert [done for done, _, _ in seen] == list(range(1, 30))
    assert {total for _, total, _ in seen} == {29}  # 9 in each of 3 layers, embedding, norm
    split(folder, 3)
    assert_same(load_model(folder, "lm", one_device)[1], one)


def test_parts_on_eight_devices_equal_the_whole(tiny, one_device):
    folder = tiny("qwen2-windows").folder
    model, whole = load_model(folder, "lm", one_device)
    train, rollout = make_partitions(Split(1, 4, 2), Split(-1, 1, 2))
    for partition in (train, rollout):
        _, params = load_model(folder, "lm", partition)
        shardings = model.shardings(partition)
        jax.tree.map(
            lambda x, s: None if x.sharding == s else pytest.fail(f"{x.sharding} is not {s}"), params, shardings
        )
        assert_same(params, whole)
    _, params = load_model(folder, "lm", train)
    kernel = params["decoder"]["layers"]["attention"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 8, 2, 8)  # [3, 32, 4, 8]: embed over 4, heads over 2
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 96, (4, 9)))
    inputs = Inputs(tokens, jnp.broadcast_to(jnp.arange(9), (4, 9)), jnp.ones((4, 9), int))

    @jax.jit
    def logits(params, inputs):
        module = model.bind(params)
        return module.logits(module(inputs)[0])

    with train.active():
        sharded = logits(params, jax.device_put(inputs, train.replicated))
    np.testing.assert_allclose(sharded, logits(whole, inputs), atol=1e-5)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(folder, one_device, stored, dtype):
    original = load_file(folder / "model.safetensors")["model.norm.weight"]
    edit_tensors(folder, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
                                             for k, v in t.items()}))  # fmt: skip
    _, params = load_model(folder, "lm", one_device, dtype=dtype)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = jnp.asarray(original).astype(stored).astype(dtype)
    np.testing.assert_array_equal(params["decoder"]["norm"]["scale"], expected)


def test_parameters_may_be_donated_without_spoiling_copies(tiny):
    """Replicas of a parameter share one host buffer while they are read; donating one must not write to another."""
    _, rollout = make_partitions(Split(8, 1, 1), Split(8, 1, 1))
    folder = tiny("mistral").folder
    _, params = load_model(folder, "lm", rollout)
    before = np.asarray(load_model(folder, "lm", rollout)[1]["decoder"]["embedding"])
    add = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    after = add(params)["decoder"]["embedding"]
    for shard in after.addressable_shards:
        np.testing.assert_array_equal(shard.data, before + 1)


# Everything that may be wrong with a folder: how it is spoiled, and what the message must say.


def drop_tensor(folder):
    edit_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def extra_tensor(folder):
    edit_tensors(folder, lambda t: t.update(surprise=np.zeros(3, np.float32)))


def extra_bias(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}))


def wrong_shape(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.2.mlp.down_proj.weight": np.zeros((32, 47), np.float32)}))


def integers(folder):
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def corrupt(folder):
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def empty_file(folder):
    (folder / "model.safetensors").write_bytes(b"")


def absent_file(folder):
    split(folder, 2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_lies(folder):
    split(folder, 2)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    values["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(values))


def index_empty(folder):
    split(folder, 2)
    (folder / "model.safetensors.index.json").write_text("{}")


def index_broken(folder):
    split(folder, 2)
    (folder / "model.safetensors.index.json").write_text("{")


def no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def two_files(folder):
    split(folder, 2)
    (folder / "model.safetensors.index.json").unlink()


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def list_config(folder):
    (folder / "config.json").write_text("[]")


def other_type(folder):
    edit_config(folder, model_type="bloom")


def other_rope(folder):
    edit_config(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0})


def uneven_heads(folder):
    edit_config(folder, num_key_value_heads=3)


def unequal_head(folder):
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))


def untied(folder):
    edit_config(folder, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_tensor, r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        (extra_tensor, r"tensor surprise in .*model.safetensors is unknown to the family"),
        (extra_bias, r"tensor model.layers.0.self_attn.q_proj.bias in .* is unknown"),
        (wrong_shape, r"tensor model.layers.2.mlp.down_proj.weight in .* has shape \(32, 47\), not \(32, 48\)"),
        (integers, r"model.safetensors: tensor model.norm.weight is stored as I8"),
        (truncated, r"model.safetensors: truncated or corrupt"),
        (corrupt, r"model.safetensors: truncated or corrupt"),
        (empty_file, r"model.safetensors: truncated or corrupt \(0 bytes"),
        (absent_file, r"index.json: tensor .* lie in model-00002-of-00002.safetensors, which is not in the folder"),
        (index_lies, r"index.json: tensor model\.\S+ is said to lie in model-0000\d-of-\S+, which does not hold it"),
        (index_empty, r"index.json: no weight_map"),
        (index_broken, r"index.json: not valid JSON"),
        (no_weights, r"no model.safetensors .*; pytorch_model.bin must be converted"),
        (two_files, r"2 safetensors files and no model.safetensors.index.json"),
        (no_config, r"no config.json"),
        (broken_config, r"config.json: not valid JSON"),
        (list_config, r"config.json: a JSON object is needed"),
        (other_type, r"config.json: config key model_type = 'bloom'"),
        (other_rope, r"config.json: config key rope_parameters: rope type 'dynamic'"),
        (uneven_heads, r"config.json: heads = 4 is not a multiple of kv_heads = 3"),
        (unequal_head, r"tensor lm_head.weight differs from model.embed_tokens.weight"),
        (untied, r"tensor lm_head.weight is missing"),
    ],
)  # fmt: skip
def test_a_spoiled_folder_is_an_error_that_names_it(folder, one_device, spoil, message):
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(folder, "lm", one_device)
    assert str(folder) in str(error.value)


def test_nothing_there(tmp_path, folder, one_device):
    with pytest.raises(CheckpointError, match=r"model.safetensors: a file that is not a \.gguf; give its folder"):
        load_model(folder / "model.safetensors", "lm", one_device)
    for path in (tmp_path / "nowhere", tmp_path / "no.gguf"):
        with pytest.raises(CheckpointError, match="no such"):
            load_model(path, "lm", one_device)


def test_known_extras_are_accepted(folder, one_device):
    _, plain = load_model(folder, "lm", one_device)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit_tensors(folder, add)
    assert_same(load_model(folder, "lm", one_device)[1], plain)


# Heads.


def test_critic_and_reward_model_from_a_language_model(tiny, one_device):
    folder = tiny("llama").folder  # untied: its lm_head lies unused
    _, critic = load_model(folder, "value", one_device)
    assert critic["head"]["kernel"].shape == (32, 1)
    assert not np.asarray(critic["head"]["kernel"]).any()
    assert not np.asarray(critic["head"]["bias"]).any()
    model, reward = load_model(folder, "reward", one_device, seed=3)
    assert reward["head"].keys() == {"kernel"}
    kernel = np.asarray(reward["head"]["kernel"])
    assert 0.5 < kernel.std() * 33**0.5 < 1.5
    assert not np.array_equal(kernel, load_model(folder, "reward", one_device, seed=4)[1]["head"]["kernel"])
    assert_same(reward["decoder"], critic["decoder"])
    assert jax.tree.map(lambda x: x.shape, reward) == jax.tree.map(lambda x: x.shape, model.abstract)


def test_reward_model_and_critic_from_a_sequence_classifier(tiny, one_device):
    made = tiny("qwen3", "ForSequenceClassification", num_labels=1)
    _, reward = load_model(made.folder, "reward", one_device)
    weight = made.model.score.weight.detach().numpy()
    np.testing.assert_array_equal(reward["head"]["kernel"], weight.T)
    _, critic = load_model(made.folder, "value", one_device)
    np.testing.assert_array_equal(critic["head"]["kernel"], weight.T)
    assert not np.asarray(critic["head"]["bias"]).any()


def test_critic_from_a_token_classifier(tiny, one_device):
    made = tiny("llama", "ForTokenClassification", num_labels=1)
    model, critic = load_model(made.folder, "value", one_device)
    assert float(critic["head"]["bias"][0]) == pytest.approx(made.model.score.bias.item())
    values = model.bind(critic)(Inputs(jnp.array([[5, 6, 7]]), jnp.array([[0, 1, 2]]), jnp.array([[1, 1, 1]])))
    expected = made.model(torch.tensor([[5, 6, 7]])).logits.detach().numpy()
    np.testing.assert_allclose(values, expected, atol=1e-4)


def test_several_labels(tiny, one_device):
    folder = tiny("mistral", "ForSequenceClassification", num_labels=9).folder
    _, reward = load_model(folder, "reward", one_device)
    assert reward["head"]["kernel"].shape == (32, 9)
    with pytest.warns(UserWarning, match="9 labels"):
        _, critic = load_model(folder, "value", one_device)
    assert critic["head"]["kernel"].shape == (32, 1)
    assert not np.asarray(critic["head"]["kernel"]).any()


def test_the_classifier_spelling(tiny, tmp_path, one_device):
    made = tiny("llama", "ForTokenClassification", num_labels=1)
    folder = Path(shutil.copytree(made.folder, tmp_path / "m"))

    def rename(tensors):
        for part in ("weight", "bias"):
            tensors[f"classifier.{part}"] = tensors.pop(f"score.{part}")

    edit_tensors(folder, rename)
    assert_same(load_model(folder, "value", one_device)[1], load_model(made.folder, "value", one_device)[1])


def test_a_classifier_is_no_language_model(tiny, tmp_path, one_device):
    made = tiny("llama", "ForTokenClassification", num_labels=1)
    with pytest.raises(CheckpointError, match="LlamaForTokenClassification holds no language model"):
        load_model(made.folder, "lm", one_device)
    folder = Path(shutil.copytree(made.folder, tmp_path / "m"))
    edit_tensors(folder, lambda t: (t.pop("score.weight"), t.pop("score.bias")))
    with pytest.raises(CheckpointError, match=r"score.weight is missing from a classification folder"):
        load_model(folder, "value", one_device)
