"""Tokenizers, chat templates and stop tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from yatt_jax.data.config import DataError
from yatt_jax.data.tokenizer import character_tokenizer, encode, load_tokenizer, raw_prefix, render, stop_token_ids

USER = [{"role": "user", "content": "hi"}]


def test_a_character_tokenizer_is_exact():
    tokenizer = load_tokenizer("characters:0123456789:\n ")
    assert len(tokenizer) == 14
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert encode(tokenizer, ["27 4:\n", "<eos>1"]) == [[3, 8, 13, 5, 11, 12], [0, 2]]
    assert tokenizer.decode([3, 8, 13, 5, 11, 12, 0], skip_special_tokens=True) == "27 4:\n"
    with pytest.raises(Exception, match="WordLevel error"):
        encode(tokenizer, ["x"])


def test_a_character_tokenizer_reloads_in_stock_transformers(tmp_path: Path):
    made = load_tokenizer("characters:ab c")
    made.save_pretrained(tmp_path)
    for reloaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert encode(reloaded, ["a cb"]) == encode(made, ["a cb"]) == [[1, 3, 4, 2]]
        assert reloaded.decode([1, 3, 4, 2, 0], skip_special_tokens=True) == "a cb"
        assert (reloaded.eos_token_id, reloaded.pad_token_id, len(reloaded)) == (0, 0, 5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("characters:", "alphabet is empty"),
        ("characters:abca", r"\['a'\] are given twice"),
        ("/nowhere/model", "/nowhere/model: no tokenizer there"),
        ("./tokenizer.json", "no tokenizer there"),
    ],
)
def test_wrong_specs(spec, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(spec)


def test_a_folder_without_a_tokenizer(tmp_path: Path):
    with pytest.raises(DataError, match=r"the tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_missing_pad_token_is_the_end_token(tmp_path: Path):
    tokenizer = character_tokenizer("ab")
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(tmp_path)).pad_token == "<eos>"


def test_render(chat_tokenizer):
    assert render(chat_tokenizer, USER) == "[u]hi<end>[a]"
    assert render(chat_tokenizer, USER, system="be brief") == "[s]be brief<end>[u]hi<end>[a]"
    own = [{"role": "system", "content": "mine"}, *USER]
    assert render(chat_tokenizer, own, system="be brief") == "[s]mine<end>[u]hi<end>[a]"
    assert render(chat_tokenizer, USER, template_kwargs={"mark": "!"}) == "[u]hi<end>[a]!"
    prefill = [*USER, {"role": "assistant", "content": "well"}]
    assert render(chat_tokenizer, prefill) == "[u]hi<end>[a]well"  # the response continues the turn


def test_render_errors(chat_tokenizer, plain_tokenizer):
    with pytest.raises(DataError, match=r"p\.jsonl:3: the chat template failed on turns \(user, user\).*alternate"):
        render(chat_tokenizer, [*USER, *USER], source="p.jsonl:3")
    with pytest.raises(DataError, match=r"p\.jsonl:3: a conversation needs a chat template.*data\.chat_template"):
        render(plain_tokenizer, USER, source="p.jsonl:3")


def test_no_second_beginning_token(chat_tokenizer):
    """Field lesson 8: template and tokenizer each added one."""
    from tokenizers.processors import TemplateProcessing

    chat_tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = chat_tokenizer.bos_token_id
    assert raw_prefix(chat_tokenizer) == ""  # a beginning token that the tokenizer itself does not add
    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    chat_tokenizer.chat_template = "<bos>" + chat_tokenizer.chat_template.strip()
    text = render(chat_tokenizer, USER)
    assert chat_tokenizer(text)["input_ids"].count(bos) == 2  # what would happen
    assert encode(chat_tokenizer, [text])[0].count(bos) == 1
    assert raw_prefix(chat_tokenizer) == "<bos>"


def test_stop_tokens(chat_tokenizer, plain_tokenizer, tmp_path: Path):
    end = chat_tokenizer.convert_tokens_to_ids("<end>")
    assert stop_token_ids(plain_tokenizer) == (0,)
    assert stop_token_ids(chat_tokenizer) == (0, end)  # the template ends turns by it
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert stop_token_ids(chat_tokenizer, tmp_path) == (0, 9, end)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert stop_token_ids(chat_tokenizer, tmp_path) == (0, 5, 7, end)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert stop_token_ids(plain_tokenizer, tmp_path) == (0, 9)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json: damaged"):
        stop_token_ids(plain_tokenizer, tmp_path)


def test_a_template_without_end_tokens_adds_no_stop(chat_tokenizer):
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
    assert stop_token_ids(chat_tokenizer) == (0,)
    chat_tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert stop_token_ids(chat_tokenizer) == (0,)


def test_works_without_torch(tmp_path: Path):
    character_tokenizer("ab").save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from yatt_jax.data.tokenizer import load_tokenizer, encode\n"
        f"t = load_tokenizer({str(tmp_path)!r}); t.chat_template = '{{{{ messages[0].content }}}}'\n"
        "from yatt_jax.data.tokenizer import render\n"
        "print(encode(t, [render(t, [{'role': 'user', 'content': 'ba'}])]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[[2, 1]]", done.stderr
