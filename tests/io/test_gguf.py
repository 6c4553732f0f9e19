"""GGUF files, written here the way llama.cpp's converter does, and read back as the model they came from."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from tools.convert_hf import main as convert_main
from yatt_jax.io.gguf import load_tokenizer
from yatt_jax.io.gguf_file import GgufFile
from yatt_jax.io.gguf_tokenizer import tokenizer_from_metadata
from yatt_jax.io.hf import CheckpointError, load_model, read_folder
from yatt_jax.models.names import flatten
from yatt_jax.parallel.partition import Split, make_partitions

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}  # fmt: skip
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BYTES = sorted({*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)})


def byte_alphabet() -> list[str]:
    """The 256 characters that a byte-level vocabulary writes bytes with."""
    spare = iter(range(256, 512))
    return [chr(b) if b in BYTES else chr(next(spare)) for b in range(256)]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of queries and keys: halves become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str, gemma: bool) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{(PARTS | (GEMMA_NORMS if gemma else NORMS))[part]}.{kind}"


def write(path: Path, model: Any, quantization: str = "F32", metadata=None, drop: tuple[str, ...] = ()) -> Path:
    """A torch model as a GGUF file."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    gemma = arch == "gemma3"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"] if gemma else ropes["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if gemma and name.endswith("norm.weight"):
            values = values + 1
        raw = gguf_name(name, gemma)
        if raw in drop:
            continue
        kind = gguf.GGMLQuantizationType[quantization]
        if kind != gguf.GGMLQuantizationType.F32 and values.ndim == 2:
            writer.add_tensor(raw, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(raw, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_as_folder(file: Path, folder: Path, partition) -> None:
    _, ours = load_model(file, "lm", partition)
    _, expected = load_model(folder, "lm", partition)
    flat = dict(flatten(ours))
    for path, value in flatten(expected):
        np.testing.assert_allclose(flat[path], value, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("origin", ["llama", "llama-linear", "mistral-full", "qwen2-windows", "qwen3"])
def test_tensors_and_config(origin, tiny, tmp_path, one_device):
    made = tiny(origin, **({"rope_scaling": YARN} if origin == "qwen3" else {}))
    metadata = {
        "llama-linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0},
        "qwen3": {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
                  "qwen3.rope.scaling.original_context_length": 16},
    }.get(origin)  # fmt: skip
    file = write(tmp_path / "m.gguf", made.model, metadata=metadata)
    same_as_folder(file, made.folder, one_device)
    ours, theirs = read_folder(file), read_folder(made.folder)
    assert ours.model_type == {"mistral-full": "llama"}.get(origin, theirs.model_type)
    for field in ("ropes", "head_dim", "kv_heads", "qkv_bias", "mlp_bias", "norm_eps", "tied", "vocab"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    assert ours.hf_config["eos_token_id"] == 2


@pytest.mark.parametrize("pattern", ["number", "list"])
def test_gemma(pattern, tiny, tmp_path, one_device):
    made = tiny("gemma3", query_pre_attn_scalar=16)
    metadata: dict[str, Any] = {
        "gemma3.attention.sliding_window": 5,
        "gemma3.attention.sliding_window_pattern": 3 if pattern == "number" else [True, True, False],
        "gemma3.final_logit_softcapping": 3.0,
        "gemma3.rope.freq_base_swa": 10000.0,
    }
    file = write(tmp_path / "m.gguf", made.model, metadata=metadata)
    same_as_folder(file, made.folder, one_device)
    assert read_folder(file).config == read_folder(made.folder).config


def test_llama3_rope_factors(tiny, tmp_path, one_device):
    """Llama 3.1's scaling travels as a tensor of divisors, one a frequency."""
    theta, head_dim = 500000.0, 8
    made = tiny("llama", rope_theta=theta)
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * np.pi / frequency
    smooth = (8192 / wavelength - 1) / 3
    divisors = np.where(wavelength < 2048, 1, np.where(wavelength > 8192, 32, 1 / ((1 - smooth) / 32 + smooth)))
    assert divisors[0] == 1
    assert divisors[-1] == 32
    writer_model = made.model
    file = write_with_tensor(tmp_path / "m.gguf", writer_model, "rope_freqs.weight", divisors.astype(np.float32))
    rope = read_folder(file).config.ropes[0]
    assert (rope.kind, rope.factor, rope.original_positions) == ("llama3", 32.0, 8192)
    load_model(file, "lm", one_device)
    odd = write_with_tensor(
        tmp_path / "n.gguf", writer_model, "rope_freqs.weight", divisors.astype(np.float32)[::-1].copy()
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not the llama3 rotary scaling"):
        read_folder(odd)


def write_with_tensor(path: Path, model: Any, name: str, values: np.ndarray) -> Path:
    class Extra:
        config = model.config

        @staticmethod
        def named_parameters():
            yield from model.named_parameters()

    original = gguf.GGUFWriter.write_header_to_file

    def add_first(self, *args, **kwargs):
        self.add_tensor(name, values)
        return original(self, *args, **kwargs)

    gguf.GGUFWriter.write_header_to_file = add_first
    try:
        return write(path, Extra)
    finally:
        gguf.GGUFWriter.write_header_to_file = original


@pytest.mark.parametrize(("quantization", "error"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 3e-2), ("Q4_0", 0.5)])
def test_quantized(quantization, error, tiny, tmp_path, one_device):
    made = tiny("llama-linear", intermediate_size=64, hidden_size=64)
    file = write(tmp_path / "m.gguf", made.model, quantization)
    _, ours = load_model(file, "lm", one_device)
    _, exact = load_model(made.folder, "lm", one_device)
    for (path, a), (_, b) in zip(flatten(ours), flatten(exact), strict=True):
        difference = np.abs(np.asarray(a) - np.asarray(b)).max()
        assert difference < error, path
        assert difference > 0 or "norm" in path


def test_parts_on_eight_devices_equal_the_whole(tiny, tmp_path, one_device):
    file = write(tmp_path / "m.gguf", tiny("llama-linear", intermediate_size=64, hidden_size=64).model, "Q8_0")
    train, _ = make_partitions(Split(1, 4, 2), Split(-1, 1, 2))
    _, parts = load_model(file, "lm", train)
    _, whole = load_model(file, "lm", one_device)
    for (path, a), (_, b) in zip(flatten(parts), flatten(whole), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_conversion_to_a_stock_folder(tiny, tmp_path, capsys):
    made = tiny("llama")
    file = write(tmp_path / "m.gguf", made.model, metadata=byte_level_metadata())
    assert convert_main([str(file), str(tmp_path / "out")]) == 0
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    loaded, info = read
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.tensor([[4, 8, 15, 16, 23, 42]])
    np.testing.assert_allclose(loaded(ids).logits.detach(), made.model(ids).logits.detach(), atol=1e-5)
    text = "the cat, 12 hats"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
    assert tokens == load_tokenizer(file)(text)["input_ids"]
    assert "lm, float32" in capsys.readouterr().out


# Damaged files.


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny("llama").model, metadata=byte_level_metadata())


def test_a_truncated_file_is_an_error_wherever_it_is_cut(file, tmp_path):
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 10, 30, 200, len(whole) // 2, len(whole) - 4000, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut.gguf: .*(truncated|empty)") as error:
            read_folder(cut)
        assert "download it again" in str(error.value)
    cut.write_bytes(whole[:-40])
    with pytest.raises(CheckpointError, match=r"truncated: tensor .* ends at byte"):
        read_folder(cut)


def test_not_a_gguf_file(file, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_folder(other)
    other.write_bytes(file.read_bytes()[:4] + struct.pack("<I", 1) + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="GGUF version 1"):
        load_tokenizer(other)
    with pytest.raises(CheckpointError, match="no such file"):
        load_tokenizer(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("metadata", "drop", "message"),
    [
        ({}, ("blk.1.ffn_up.weight",), r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        ({}, ("token_embd.weight",), r"tensor token_embd.weight is missing"),
        ({"llama.rope.scaling.type": "longrope"}, (), r"llama.rope.scaling.type = 'longrope'"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, (), r"head_count_kv differs by layer"),
        ({"llama.rope.dimension_count": 4}, (), r"llama.rope.dimension_count = 4 and heads of 8"),
        ({"general.architecture": "falcon"}, (), r"general.architecture = 'falcon' is not supported; llama"),
    ],
)
def test_what_does_not_fit(metadata, drop, message, tiny, tmp_path, one_device, monkeypatch):
    file = write(tmp_path / "m.gguf", tiny("llama").model, drop=drop)
    header = GgufFile(file).metadata | metadata
    original = GgufFile.__init__

    def patched(self, path):
        original(self, path)
        self.metadata = header

    monkeypatch.setattr(GgufFile, "__init__", patched)
    with pytest.raises(CheckpointError, match=message):
        load_model(file, "lm", one_device)


# Tokenizers.

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def byte_level_metadata(pre: str = "smollm") -> dict[str, Any]:
    """A byte-level vocabulary with a few merges."""
    merges = ["t h", "th e", "Ġ the", "c a", "Ġ c", "1 2", "Ġ h"]
    tokens = ["<pad>", "<|user|>", "<|end|>", *byte_alphabet(), *(m.replace(" ", "") for m in merges), "<tool>"]
    kinds = [3, 3, 3] + [1] * (256 + len(merges)) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def test_byte_level_tokenizer(file):
    tokenizer = load_tokenizer(file)
    text = "the cat<|end|> 12é <tool>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "the", "Ġ", "ca", "t", "<|end|>", "Ġ", "1", "2", "Ã", "©", "Ġ", "<tool>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat 12é <tool>"  # user-defined, not special
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<pad>", "<|user|>", "<|end|>")
    messages = [{"role": "user", "content": "the"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>the<|end|>"
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123's  B", ["a", "Ġ123", "'s", "Ġ", "ĠB"]),
        ("smollm", "a 123's  B", ["a", "Ġ", "1", "2", "3", "'s", "Ġ", "ĠB"]),
        ("llama-bpe", "a 12345'S  B", ["a", "Ġ", "123", "45", "'S", "Ġ", "ĠB"]),
        ("qwen2", "a 12'S\n\n B", ["a", "Ġ", "1", "2", "'S", "ĊĊ", "ĠB"]),
        ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
    ],
)
def test_how_text_is_cut(pre, text, pieces, tiny, tmp_path):
    file = write(tmp_path / "m.gguf", tiny("llama").model, metadata=byte_level_metadata(pre))
    backend = load_tokenizer(file).backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, r"tokenizer.ggml.pre = 'martian' is not known \(deepseek-r1-qwen, gpt-2"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer.ggml.model = 'bert' cannot be rebuilt"),
    ],
)
def test_unknown_tokenizers(change, message, tiny, tmp_path):
    file = write(tmp_path / "m.gguf", tiny("llama").model, metadata=byte_level_metadata() | change)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(file)


def test_no_tokenizer(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="no vocabulary"):
        load_tokenizer(write(tmp_path / "m.gguf", tiny("llama").model))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer(prefix, tiny, tmp_path):
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁the",
        "▁t",
        "he",
        "▁",
        "t",
        "h",
        "e",
        "c",
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    file = write(tmp_path / "m.gguf", tiny("llama").model, metadata=metadata)
    if not prefix:
        header = GgufFile(file).metadata | {"tokenizer.ggml.add_space_prefix": False}
        tokenizer = tokenizer_from_metadata(header, "m.gguf")
    else:
        tokenizer = load_tokenizer(file)
    ids = tokenizer("the the é")["input_ids"]
    first = ["▁the"] if prefix else ["t", "he"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *first, "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the the é"
    assert tokenizer("the", add_special_tokens=False)["input_ids"] == ids[1 : 1 + len(first)]
