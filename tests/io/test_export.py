"""Exported folders are stock folders: transformers loads them without a missing or unexpected key, outputs equal."""

from __future__ import annotations

import json
import os
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tools.convert_hf import main as convert_main
from yatt_jax.io import export, tensor_files
from yatt_jax.io.export import ExportError, save_folder
from yatt_jax.io.hf import load_model, read_folder
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import to_hf
from yatt_jax.parallel.partition import Split, make_partitions

IDS = torch.tensor([[5, 17, 3, 80, 41, 9, 2, 33]])
AUTO = {
    "lm": transformers.AutoModelForCausalLM,
    "value": transformers.AutoModelForTokenClassification,
    "reward": transformers.AutoModelForSequenceClassification,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = ["<pad>", "<bos>", "<eos>", *"abcdefgh "]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}",
    )


def stock(folder, kind: str) -> Any:
    """The folder as transformers reads it, refusing any key that does not fit."""
    model, info = AUTO[kind].from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def outputs(model) -> np.ndarray:
    with torch.no_grad():
        return model(IDS).logits.numpy()


def reexport(made, kind, out, tokenizer, one_device, **options):
    model, params = load_model(made.folder, kind, one_device)
    return save_folder(out, model, params, read_folder(made.folder).hf_config, tokenizer, dtype="float32", **options)


def test_language_models(family_case, tiny, tmp_path, tokenizer, one_device):
    made = tiny(family_case)
    out = reexport(made, "lm", tmp_path / "out", tokenizer, one_device)
    loaded = stock(out, "lm")
    np.testing.assert_allclose(outputs(loaded), outputs(made.model), atol=1e-5)
    assert type(loaded) is type(made.model)
    ours, theirs = load_file(out / "model.safetensors"), load_file(made.folder / "model.safetensors")
    assert ours.keys() == theirs.keys()  # also: a tied matrix once
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    assert ("lm_head.weight" in ours) != made.model.config.tie_word_embeddings


@pytest.mark.parametrize("case_of_critic", ["llama", "mistral", "qwen2", "qwen3-bias"])
def test_critics(case_of_critic, tiny, tmp_path, tokenizer, one_device):
    made = tiny(case_of_critic, "ForTokenClassification", num_labels=1)
    out = reexport(made, "value", tmp_path / "out", tokenizer, one_device)
    loaded = stock(out, "value")
    assert loaded.num_labels == 1
    assert loaded.dropout.p == 0
    np.testing.assert_allclose(outputs(loaded), outputs(made.model), atol=1e-5)


@pytest.mark.parametrize("labels", [1, 4])
def test_reward_models(family_case, labels, tiny, tmp_path, tokenizer, one_device):
    made = tiny(family_case, "ForSequenceClassification", num_labels=labels)
    out = reexport(made, "reward", tmp_path / "out", tokenizer, one_device)
    loaded = stock(out, "reward")
    assert loaded.num_labels == labels
    np.testing.assert_allclose(outputs(loaded), outputs(made.model), atol=1e-5)


def test_a_critic_started_from_a_language_model(tiny, tmp_path, tokenizer, one_device):
    out = reexport(tiny("llama"), "value", tmp_path / "out", tokenizer, one_device)
    assert not outputs(stock(out, "value")).any()


def test_a_gemma_critic_is_read_back_by_us(tiny, tmp_path, tokenizer, one_device):
    with pytest.warns(UserWarning, match="no class for a gemma3_text critic"):
        out = reexport(tiny("gemma3"), "value", tmp_path / "out", tokenizer, one_device)
    load_model(out, "value", one_device)


def test_shards_and_index(tiny, tmp_path, tokenizer, one_device):
    made = tiny("qwen2")
    out = reexport(made, "lm", tmp_path / "out", tokenizer, one_device, shard_bytes=30_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 30_000 + 4000 for file in files)  # and the header
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in made.model.parameters())
    np.testing.assert_allclose(outputs(stock(out, "lm")), outputs(made.model), atol=1e-5)
    load_model(out, "lm", one_device)


def test_sharded_parameters_are_written_whole(tiny, tmp_path, tokenizer):
    made = tiny("llama")
    train, _ = make_partitions(Split(1, 4, 2), Split(-1, 1, 2))
    model, params = load_model(made.folder, "lm", train)
    out = save_folder(tmp_path / "o", model, params, read_folder(made.folder).hf_config, tokenizer, dtype="float32")
    np.testing.assert_allclose(outputs(stock(out, "lm")), outputs(made.model), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype, tiny, tmp_path, one_device):
    made = tiny("mistral-full")
    model, params = load_model(made.folder, "lm", one_device)
    out = save_folder(tmp_path / "out", model, params, read_folder(made.folder).hf_config, None, dtype=dtype)
    with safe_open(out / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "pt"
        stored = {file.get_slice(name).get_dtype() for name in list(file.keys())}
    assert stored == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)
    assert 0 < np.abs(outputs(stock(out, "lm")) - outputs(made.model)).max() < 0.3
    with pytest.raises(ExportError, match="dtype = 'int8'"):
        save_folder(tmp_path / "o", model, params, read_folder(made.folder).hf_config, None, dtype="int8")


def test_tokenizer_and_generation_config(tiny, tmp_path, tokenizer, one_device):
    generation = {"eos_token_id": [7, 2], "temperature": 0.6, "do_sample": True}
    out = reexport(tiny("llama"), "lm", tmp_path / "out", tokenizer, one_device, generation_config=generation)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("bad egg")["input_ids"] == tokenizer("bad egg")["input_ids"] == [4, 3, 6, 11, 7, 9, 9]
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "hi<eos>"
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    read = transformers.GenerationConfig.from_pretrained(out)
    assert read.eos_token_id == [7, 2]
    assert (read.temperature, read.do_sample, read.bos_token_id, read.pad_token_id) == (0.6, True, 1, 0)
    assert read_folder(out).generation_config["eos_token_id"] == [7, 2]


def test_a_model_made_here(tmp_path, tokenizer, one_device):
    config = DecoderConfig(vocab=12, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24)
    model = build("lm", config)
    params = model.init(0, one_device)
    out = save_folder(tmp_path / "out", model, params, to_hf("llama", config, 64), tokenizer, dtype="float32")
    loaded = stock(out, "lm")
    assert loaded.generation_config.eos_token_id == 2
    again, read = load_model(out, "lm", one_device)
    assert again.config == config
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), read, params)


def test_another_models_config(tiny, tmp_path, tokenizer, one_device):
    made = tiny("llama")
    model, params = load_model(made.folder, "lm", one_device)
    values = read_folder(made.folder).hf_config | {"vocab_size": 97}
    with pytest.raises(ExportError, match="vocab_size 97, and the model 96"):
        save_folder(tmp_path / "out", model, params, values, tokenizer)
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way(tiny, tmp_path, tokenizer, one_device):
    made, out = tiny("llama"), tmp_path / "out"
    out.mkdir()
    reexport(made, "lm", out, tokenizer, one_device)  # an empty folder
    (out / "stale").touch()
    reexport(made, "lm", out, tokenizer, one_device)  # an earlier export
    assert not (out / "stale").exists()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("...")
    with pytest.raises(ExportError, match="thesis is not empty and not an earlier export"):
        reexport(made, "lm", other, tokenizer, one_device)
    assert (other / "chapter1.tex").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes((made.folder / "model.safetensors").read_bytes())
    with pytest.raises(ExportError, match="foreign is not empty"):
        reexport(made, "lm", foreign, tokenizer, one_device)
    reexport(made, "lm", foreign, tokenizer, one_device, force=True)
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="file is a file"):
        reexport(made, "lm", tmp_path / "file", tokenizer, one_device)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "foreign", "out", "thesis"]  # nothing half-done


@pytest.mark.parametrize("at", ["tensors", "tokenizer"])
def test_a_full_disk_leaves_the_earlier_export(at, tiny, tmp_path, tokenizer, one_device, monkeypatch):
    made, out = tiny("llama"), tmp_path / "out"
    reexport(made, "lm", out, tokenizer, one_device)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def full_disk_as_tokenizers_say(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    if at == "tensors":
        monkeypatch.setattr(tensor_files._Writer, "_write", full_disk)
    else:
        monkeypatch.setattr(export, "_write_tokenizer", full_disk_as_tokenizers_say)
    with pytest.raises(ExportError, match=r"out: the disk is full \(\d+\.\d MiB free\); nothing was exported"):
        reexport(made, "lm", out, tokenizer, one_device)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_killed_export_leaves_is_cleared_away(tiny, tmp_path, tokenizer, one_device):
    made, out = tiny("llama"), tmp_path / "out"
    reexport(made, "lm", out, tokenizer, one_device)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".out.old").mkdir()
    out.rename(tmp_path / ".out.old" / "out")  # killed between the two renames

    def fails(*_: Any) -> None:
        raise ExportError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "check_written", fails)
        with pytest.raises(ExportError):
            reexport(made, "lm", out, tokenizer, one_device)
    assert os.listdir(tmp_path) == ["out"]  # the earlier export is back
    np.testing.assert_allclose(outputs(stock(out, "lm")), outputs(made.model), atol=1e-5)
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "out").mkdir()  # killed after them
    reexport(made, "lm", out, tokenizer, one_device)
    assert os.listdir(tmp_path) == ["out"]


class Peers:
    """Three processes, of which the last fails at a step."""

    def __init__(self, step: str):
        self.step, self.asked = step, []

    def gather(self, name: str, value: Any) -> list[Any]:
        self.asked.append(name)
        return [value, None, "its disk is full" if name == self.step else None]


@pytest.mark.parametrize("step", ["export prepared", "export seen by all", "export written", "export in place"])
def test_a_failure_elsewhere(step, tiny, tmp_path, tokenizer, one_device):
    made, out = tiny("llama"), tmp_path / "out"
    peers = Peers(step)
    with pytest.raises(ExportError, match="process 2 could not do its share: its disk is full"):
        reexport(made, "lm", out, tokenizer, one_device, hosts=peers)
    assert peers.asked[-1] == step
    assert os.listdir(tmp_path) == (["out"] if step == "export in place" else [])
    reexport(made, "lm", out, tokenizer, one_device, hosts=Peers("none"))
    assert os.listdir(tmp_path) == ["out"]


def test_a_url_is_refused(tiny, tokenizer, one_device):
    with pytest.raises(ExportError, match="gs://bucket/out: an export is a local or mounted folder"):
        reexport(tiny("llama"), "lm", "gs://bucket/out", tokenizer, one_device)


def test_files_are_readable_by_others(tiny, tmp_path, tokenizer, one_device):
    out = reexport(tiny("llama"), "lm", tmp_path / "out", tokenizer, one_device)
    modes = {(out / name).stat().st_mode & 0o777 for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_convert_command_on_folders(tiny, tmp_path, capsys):
    made = tiny("qwen3", "ForSequenceClassification", num_labels=1)
    out = tmp_path / "out"
    assert convert_main([str(made.folder), str(out), "--dtype", "float32", "--shard_gb", "0.00002"]) == 0
    assert "reward, float32" in capsys.readouterr().out
    np.testing.assert_allclose(outputs(stock(out, "reward")), outputs(made.model), atol=1e-5)
    assert convert_main([str(tmp_path / "nowhere"), str(out)]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
