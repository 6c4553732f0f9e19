"""Over-long prompts, raw text and what cannot be tokenized."""

from __future__ import annotations

from typing import Any

import pytest

from yatt_jax.data.config import DataConfig, DataError
from yatt_jax.data.reader import PromptReader
from yatt_jax.data.records import Record
from yatt_jax.data.tokenizer import encode


def read(tokenizer: Any, prompt: Any, **settings: Any) -> Any:
    config = DataConfig(**{"max_prompt_tokens": 20, **settings})
    fields = {"prompt": prompt, "answer": 1} if not isinstance(prompt, dict) else prompt
    return PromptReader(config, tokenizer).read([(5, Record(fields, "p.jsonl:6"))])[0]


def turns(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def test_a_prompt_is_exactly_its_tokens(chat_tokenizer, plain_tokenizer):
    for tokenizer, text, messages in (
        (chat_tokenizer, "[u]hi there<end>[a]", turns("hi there")),
        (plain_tokenizer, "hi there", []),
    ):
        outcome = read(tokenizer, "hi there")
        assert outcome.fault == ""
        assert (outcome.prompt.text, outcome.prompt.messages) == (text, messages)
        assert outcome.prompt.tokens == encode(tokenizer, [text])[0]
        assert (outcome.prompt.columns, outcome.prompt.source, outcome.prompt.index) == ({"answer": 1}, "p.jsonl:6", 5)
    assert len(read(chat_tokenizer, "hi there").prompt.tokens) == 11


def test_chat_template_setting(chat_tokenizer, plain_tokenizer, tmp_path):
    assert read(chat_tokenizer, "hi", chat_template="raw").prompt.text == "hi"
    assert read(chat_tokenizer, {"text": "hi"}).prompt.text == "hi"
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}?")
    assert read(plain_tokenizer, "hi", chat_template=str(file)).prompt.text == "hi?"
    assert plain_tokenizer.chat_template == file.read_text()  # so that an export carries it
    file.write_text(" ")
    with pytest.raises(DataError, match=r"mine\.jinja: empty chat template"):
        PromptReader(DataConfig(chat_template=str(file)), plain_tokenizer)


def test_system_and_template_kwargs(chat_tokenizer, plain_tokenizer):
    outcome = read(chat_tokenizer, "hi", system="be", template_kwargs={"mark": "!"})
    assert outcome.prompt.text == "[s]be<end>[u]hi<end>[a]!"
    outcome = read(plain_tokenizer, "hi", system="be")
    assert outcome.fault == "malformed"
    assert "p.jsonl:6: data.system is set, but this prompt is plain text" in outcome.message


def test_raw_text_begins_once_with_the_beginning_token(plain_tokenizer):
    from tokenizers.processors import TemplateProcessing

    plain_tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = plain_tokenizer.bos_token_id
    plain_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    for text in ("hi", "<bos>hi"):
        prompt = read(plain_tokenizer, text).prompt
        assert prompt.text == "<bos>hi"
        assert prompt.tokens[0] == bos
        assert prompt.tokens.count(bos) == 1
    cut = read(plain_tokenizer, "a" * 30 + "xyz", overlong="cut").prompt
    assert cut.text == "<bos>" + "a" * 16 + "xyz"
    assert len(cut.tokens) == 20


def test_overlong_is_told_with_both_lengths(chat_tokenizer):
    assert read(chat_tokenizer, "a" * 17).fault == ""  # 17 and three tokens of the template
    for setting in ("skip", "error"):
        outcome = read(chat_tokenizer, "a" * 18, overlong=setting)
        assert (outcome.prompt, outcome.fault) == (None, "overlong")
        assert outcome.message == "p.jsonl:6: a prompt of 21 tokens, and data.max_prompt_tokens is 20"


def test_cutting_keeps_the_template_and_the_end(chat_tokenizer, plain_tokenizer):
    outcome = read(chat_tokenizer, "a" * 30 + "xyz", overlong="cut")
    assert outcome.fault == "cut"
    assert outcome.prompt.text == "[u]" + "a" * 14 + "xyz<end>[a]"
    assert outcome.prompt.messages == turns("a" * 14 + "xyz")
    assert len(outcome.prompt.tokens) == 20
    assert read(plain_tokenizer, "a" * 30 + "xyz", overlong="cut").prompt.text == "a" * 17 + "xyz"


def test_cutting_drops_the_oldest_turns_first(chat_tokenizer):
    outcome = read(chat_tokenizer, {"prompt": turns("first " * 5, "second", "third")}, overlong="cut")
    assert outcome.prompt.text == "[u]third<end>[a]"  # the template still alternates
    outcome = read(chat_tokenizer, {"prompt": turns("x" * 9, "y", "third", "z", "now")}, overlong="cut")
    assert outcome.prompt.text == "[u]third<end>[a]z<end>[u]now<end>[a]"
    outcome = read(chat_tokenizer, {"prompt": turns("a" * 9, "y", "b" * 30)}, overlong="cut", system="sys")
    assert outcome.prompt.text == "[s]sys<end>[u]" + "b" * 12 + "<end>[a]"
    outcome = read(chat_tokenizer, {"prompt": turns("q", "a" * 30)}, overlong="cut")  # continued by the response
    assert outcome.prompt.text == "[u]q<end>[a]" + "a" * 16


def test_what_cannot_be_cut(chat_tokenizer):
    outcome = read(chat_tokenizer, "a" * 30, overlong="cut", system="s" * 40)
    assert outcome.fault == "malformed"
    assert "it cannot be cut: what surrounds the text of the last turn takes the whole limit" in outcome.message


def test_one_prompt_the_tokenizer_refuses_leaves_the_others(plain_tokenizer):
    reader = PromptReader(DataConfig(), plain_tokenizer)
    records = [(i, Record({"prompt": p}, f"p.jsonl:{i}")) for i, p in enumerate(["good", "naïve", "fine"])]
    outcomes = reader.read(records)
    assert [o.prompt.text if o.prompt else o.fault for o in outcomes] == ["good", "malformed", "fine"]
    assert "p.jsonl:1: the tokenizer failed: WordLevel error" in outcomes[1].message


def test_a_template_error_names_the_record(chat_tokenizer):
    outcome = read(chat_tokenizer, {"prompt": [*turns("a"), *turns("b")]})
    assert outcome.fault == "malformed"
    assert "p.jsonl:6: the chat template failed on turns (user, user)" in outcome.message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_prompt_tokens": 0}, "max_prompt_tokens = 0: must be at least 1"),
        ({"holdout": -1}, "holdout = -1"),
        ({"check_rows": -1}, "check_rows = -1"),
        ({"overlong": "drop"}, r"overlong = 'drop': expected one of \['skip', 'cut', 'error'\]"),
        ({"on_error": "stop"}, "on_error = 'stop'"),
        ({"eval": ("a.jsonl",), "holdout": 3}, "eval and holdout: set one of them"),
        ({"chat_template": "no.jinja"}, "chat_template = 'no.jinja': expected"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)
