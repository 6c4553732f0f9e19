"""A tokenizer from the metadata of a GGUF file.

GGUF holds the vocabulary, merges or scores, token types and special ids; how text is cut before merging is only named
(``tokenizer.ggml.pre``). Each name stands for a published tokenizer, rebuilt here from the parts of the ``tokenizers``
library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from yatt_jax.io.tensors import CheckpointError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


_CUTS = {
    "gpt-2": _gpt2,
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), *_gpt2()],
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "tekken": lambda: _split(_TEKKEN),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_NFC_NAMES = ("qwen2", "deepseek-r1-qwen")


def tokenizer_from_metadata(metadata: Mapping[str, Any], path: str) -> PreTrainedTokenizerFast:
    """Builds the tokenizer a GGUF file describes, chat template included.

    Args:
      metadata: of the file.
      path: of the file, for messages.

    Raises:
      CheckpointError: no vocabulary, or a tokenizer kind that is not known.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(
            f"{path}: no vocabulary (tokenizer.ggml.tokens); use the tokenizer of the original folder"
        )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens, path), metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata, tokens), True
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model = {kind!r} cannot be rebuilt (gpt2 and llama can); "
            f"use the tokenizer of the original folder"
        )
    _add_tokens(backend, metadata, tokens)
    special = {
        role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in {
            "bos_token": "bos",
            "eos_token": "eos",
            "unk_token": "unknown",
            "pad_token": "padding",
        }.items()
        if metadata.get(f"tokenizer.ggml.{key}_token_id") in range(len(tokens))
    }
    before = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    after = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if before or after:
        backend.post_processor = _template(backend, before, after)
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
        **({"model_max_length": int(context)} if context else {}),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], path: str) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre")
    if cut not in _CUTS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre = {cut!r} is not known ({', '.join(sorted(_CUTS))} are), and guessing would "
            f"cut text wrongly; use the tokenizer of the original folder"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut in _LLAMA3_NAMES))
    if cut in _NFC_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_CUTS[cut]())
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    # User-defined runs of spaces are written as spaces, and looked up as the visible space that text is turned into.
    spelled = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(spelled)}
    # Gemma's merge order is the order of its vocabulary; elsewhere the scores give it.
    scores = None if gemma else metadata.get("tokenizer.ggml.scores")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
            unk_token=None if unknown is None else spelled[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocab: Mapping[str, int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece, the best merged piece first."""
    ranked = sorted(vocab.items(), key=lambda item: item[1] if scores is None else -scores[item[1]])
    return [
        (token[:cut], token[cut:])
        for token, _ in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Marks control and user-defined tokens, which are matched whole in the text."""
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token.strip(" ")
    ]
    backend.add_tokens(added)


def _template(backend: Tokenizer, before: str | None, after: str | None) -> processors.PostProcessor:
    parts = lambda n: [*([f"{before}:{n}"] if before else []), f"${'AB'[n]}:{n}", *([f"{after}:{n}"] if after else [])]  # noqa: E731
    return processors.TemplateProcessing(
        single=parts(0),
        pair=parts(0) + parts(1),
        special_tokens=[(token, backend.token_to_id(token)) for token in {before, after} if token],
    )
