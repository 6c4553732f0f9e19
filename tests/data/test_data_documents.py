"""Tokens of rows: which are learned, by markers and by prefixes; where texts end; what is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from yatt_jax.data.config import DataError
from yatt_jax.data.documents import Document, Encoded, Encoder
from yatt_jax.data.examples import Chat
from yatt_jax.data.offline_config import OfflineConfig
from yatt_jax.data.records import Record
from yatt_jax.data.spans import Renderer
from yatt_jax.data.tokenizer import character_tokenizer
from yatt_jax.errors import InputError
from yatt_jax.types import LabelRows, PairRows, StepRows, TextRows, TopKRows, UnpairedRows

# The template of ``chat_tokenizer`` with a newline after each turn; the second says what the assistant writes.
PREFIXES = """
{%- for turn in messages %}{{ '[' + turn.role[0] + ']' + turn.content + '<end>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[a]' }}{% endif %}"""
MARKERS = """
{%- for turn in messages %}{{- '[' + turn.role[0] + ']' }}
{%- if turn.role == 'assistant' %}{% generation %}{{- turn.content }}{% endgeneration %}
{%- else %}{{ turn.content }}{% endif %}{{ '<end>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[a]' }}{% endif %}"""
# Drops what is thought in all turns but the last, as reasoning models' templates do.
FORGETFUL = """
{%- for turn in messages %}{{ '[' + turn.role[0] + ']' }}
{%- if loop.last %}{{ turn.content }}{% else %}{{ turn.content.split(':')[-1] }}{% endif %}{{ '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[a]' }}{% endif %}"""

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no!"},
]
# ids by hand: <eos> 0, a..z 1..26, A..Z 27..52, 0..9 53..62, " .,:!?-\n" 63..70, <end> 71, [u] 72, [a] 73, [s] 74
#        [s]  s  <end> \n  [u] h  i  <end> \n  [a]  y   o  <end> \n  [u]  s   o  <end> \n  [a]  n   o   !  <end> \n
TOKENS = [74, 19, 71, 70, 72, 8, 9, 71, 70, 73, 25, 15, 71, 70, 72, 19, 15, 71, 70, 73, 14, 15, 67, 71, 70]
MASK = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0]


def only_row(encoder: Encoder, fields: dict[str, Any]) -> Encoded:
    """The row that a record makes."""
    (outcome,) = encoder.read([(0, Record(fields, "f:1"))])
    assert outcome.row is not None, outcome.message
    return outcome.row


@pytest.fixture
def read(plain_tokenizer, chat_tokenizer):
    """Reads one record with a tokenizer that has the template, if one is given."""

    def outcome(kind, fields: dict[str, Any], *, template: str = "", **settings: Any):
        tokenizer = chat_tokenizer if template else plain_tokenizer
        tokenizer.chat_template = template or None
        encoder = Encoder(OfflineConfig(**settings), tokenizer, kind)
        (found,) = encoder.read([(7, Record(fields, "f.jsonl:3"))])
        return found

    return outcome


@pytest.fixture
def documents(read, plain_tokenizer, chat_tokenizer):
    """The documents of a record, each as its text with what is learned in braces."""

    def marked(kind, fields: dict[str, Any], **settings: Any) -> list[str]:
        found = read(kind, fields, **settings)
        assert found.row is not None, found.message
        tokenizer = chat_tokenizer if settings.get("template") else plain_tokenizer
        texts = []
        for document in found.row.documents:
            text, inside = "", False
            for token, learned in zip(document.tokens.tolist(), document.mask.tolist(), strict=True):
                text += ("{" if learned and not inside else "}" if inside and not learned else "") + tokenizer.decode(
                    token
                )
                inside = learned
            texts.append(text + "}" * inside)
        return texts

    return marked


@pytest.mark.parametrize("template", [PREFIXES, MARKERS])
def test_golden_masks_of_a_conversation(read, template):
    (document,) = read(TextRows, {"messages": TURNS}, template=template).row.documents
    assert document.tokens.tolist() == TOKENS
    assert document.mask.astype(int).tolist() == MASK


def test_both_methods_agree_on_a_template_with_markers(chat_tokenizer):
    chat_tokenizer.chat_template = MARKERS
    chat = Chat(TURNS, [False, False, False, False, True], "f:1")
    by_markers = Renderer(chat_tokenizer).render(chat)
    by_prefixes = Renderer(chat_tokenizer).render(chat, markers=False)
    assert by_markers.text == by_prefixes.text
    ((first, end),) = by_markers.spans
    assert by_markers.text[first:end] == "no!"
    # What a turn adds has its end as well; of it, the tokens up to <end> are learned.
    assert by_prefixes.spans == [(first, end + len("<end>\n"))]


def test_all_tokens(read):
    (document,) = read(TextRows, {"messages": TURNS}, template=PREFIXES, learn="all").row.documents
    assert document.tokens.tolist() == TOKENS
    assert document.mask.tolist() == [False] + [True] * (len(TOKENS) - 1)  # nothing predicts the first token
    with pytest.raises(InputError, match=r"data\.learn = 'all' is for texts to imitate; PairRows"):
        read(PairRows, {"prompt": "a", "chosen": "b", "rejected": "c"}, learn="all")


def test_only_the_completion_is_learned(documents):
    record = {"prompt": TURNS[1:4], "completion": "ok"}
    for template in (PREFIXES, MARKERS):
        assert documents(TextRows, record, template=template) == ["[u]hi<end>\n[a]yo<end>\n[u]so<end>\n[a]{ok<end>}\n"]


def test_a_masked_assistant(documents):
    """The other side of a NeMo chat can be learned, with markers as without."""
    turns = [{"from": "User", "value": "hi"}, {"from": "Assistant", "value": "yo"}]
    for template in (PREFIXES, MARKERS):
        found = documents(TextRows, {"conversations": turns, "mask": "Assistant"}, template=template)
        assert found == ["[u]{hi<end>}\n[a]yo<end>\n"]


def test_labels_condition_a_turn_and_are_not_learned(documents):
    turns = [{"from": "User", "value": "hi"}, {"from": "Assistant", "value": "yo", "label": "humor:4"}]
    record = {"conversations": turns, "mask": "User"}
    for template in (PREFIXES, MARKERS):
        conditioned = documents(TextRows, {**record, "type": "VALUE_TO_TEXT"}, template=template)
        assert conditioned == ["[u]hi<end>\n[a]humor:4\n{yo<end>}\n"]
        assert documents(TextRows, record, template=template) == ["[u]hi<end>\n[a]{yo<end>}\n"]


def test_plain_texts(documents):
    assert documents(TextRows, {"prompt": "ask ", "completion": "say"}) == ["ask {say<eos>}"]
    assert documents(TextRows, {"text": "say"}) == ["s{ay<eos>}"]
    assert documents(TextRows, {"prompt": "ask ", "completion": "say"}, end_token=False) == ["ask {say}"]
    assert documents(TextRows, {"text": "say<eos>"}) == ["s{ay<eos>}"]  # one end is enough
    assert documents(TextRows, {"prompt": "ask ", "completion": "say"}, learn="all") == ["a{sk say<eos>}"]
    raw = documents(TextRows, {"prompt": "ask ", "completion": "say"}, template=PREFIXES, chat_template="raw")
    assert raw == ["ask {say<eos>}"]


def test_a_template_that_ends_no_turn(documents):
    endless = PREFIXES.replace("<end>\\n", "")
    messages = {"messages": TURNS[1:3]}
    assert documents(TextRows, messages, template=endless) == ["[u]hi[a]{yo<eos>}"]
    assert documents(TextRows, messages, template=endless, end_token=False) == ["[u]hi[a]{yo}"]
    assert documents(TextRows, messages, template=endless, learn="all") == ["[u]{hi[a]yo<eos>}"]
    assert documents(TextRows, messages, template=PREFIXES, learn="all") == ["[u]{hi<end>\n[a]yo<end>\n}"]


def test_the_end_is_learned_where_it_pads_as_well(read, plain_tokenizer):
    assert plain_tokenizer.pad_token_id == plain_tokenizer.eos_token_id == 0
    (document,) = read(TextRows, {"prompt": "a", "completion": "b"}).row.documents
    assert document.tokens.tolist() == [1, 2, 0]
    assert document.mask.tolist() == [False, True, True]


def test_a_beginning_token_is_written_once(read):
    tokenizer = character_tokenizer("ab")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    from tokenizers.processors import TemplateProcessing

    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", begin)]
    )
    encoder = Encoder(OfflineConfig(), tokenizer, TextRows)
    for fields in ({"prompt": "a", "completion": "b"}, {"prompt": "<bos>a", "completion": "b"}):
        (document,) = only_row(encoder, fields).documents
        assert document.tokens.tolist() == [begin, 1, 2, 0]
        assert document.mask.tolist() == [False, False, True, True]
    for text in ("ab", "<bos>ab"):
        (document,) = only_row(encoder, {"text": text}).documents
        assert document.tokens.tolist() == [begin, 1, 2, 0]
        assert document.mask.tolist() == [False, True, True, True]


def test_tokens_of_many_characters_that_cross_a_border():
    """A token that holds the end of the prompt and the beginning of the answer is learned."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "c": 3, "bc": 4}, [("b", "c")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<eos>", eos_token="<eos>")
    encoder = Encoder(OfflineConfig(), tokenizer, TextRows)
    (document,) = only_row(encoder, {"prompt": "ab", "completion": "ca"}).documents
    assert document.tokens.tolist() == [1, 4, 1, 0]
    assert document.mask.tolist() == [False, True, True, True]


def test_pairs_and_unpaired(documents):
    pair = {"prompt": "p ", "chosen": "yes", "rejected": "n"}
    assert documents(PairRows, pair) == ["p {yes<eos>}", "p {n<eos>}"]
    assert documents(PairRows, pair, template=PREFIXES) == ["[u]p <end>\n[a]{yes<end>}\n", "[u]p <end>\n[a]{n<end>}\n"]
    assert documents(UnpairedRows, {"prompt": "p ", "completion": "y", "label": True}) == ["p {y<eos>}"]


def test_rated_conversations_and_texts(read, chat_tokenizer):
    turns = [
        {"from": "User", "value": "a"},
        {"from": "Assistant", "value": "b", "label": "quality:1"},
        {"from": "User", "value": "c"},
    ]
    row = read(LabelRows, {"conversations": turns}, template=PREFIXES).row
    assert chat_tokenizer.decode(row.documents[0].tokens) == "[u]a<end>\n[a]b<end>\n"  # up to the turn that is rated
    assert row.example.ratings[0] == 1
    assert read(LabelRows, {"text": "ab", "label": [1, 2]}).row.documents[0].tokens.tolist() == [1, 2, 0]


@pytest.mark.parametrize("template", ["", PREFIXES, MARKERS])
def test_ends_of_steps(read, template):
    record = {"prompt": "p", "completions": ["ab", "c", "no no"], "labels": [1, 0, -100]}
    found = read(StepRows, record, template=template)
    (document,) = found.row.documents
    first = document.tokens.tolist().index(1)  # the a
    assert document.steps == (first + 1, first + 3, first + 9)  # ab, newline, c, newline, five characters
    other = read(StepRows, record, template=template, step_separator=" - ")
    assert other.row.documents[0].steps == (first + 1, first + 5, first + 13)


def test_rows_too_long(read):
    record = {"prompt": "ask ", "completion": "say"}  # 8 tokens with the end
    assert read(TextRows, record, max_tokens=8).fault == ""
    skipped = read(TextRows, record, max_tokens=7)
    assert (skipped.row, skipped.fault) == (None, "overlong")
    assert skipped.message == "f.jsonl:3: a row of 8 tokens, and data.max_tokens is 7"
    cut = read(TextRows, record, max_tokens=6, overlong="cut")
    assert cut.fault == "cut"
    assert cut.row.documents[0].mask.tolist() == [False] * 4 + [True] * 2
    nothing = read(TextRows, record, max_tokens=4, overlong="cut")
    assert (nothing.row, nothing.fault) == (None, "overlong")
    assert "cut, nothing to train would be left of it" in nothing.message


def test_each_sequence_of_a_pair_keeps_something_to_train(read):
    pair = {"prompt": "ask ", "chosen": "yes", "rejected": "n"}
    cut = read(PairRows, pair, max_tokens=6, overlong="cut")
    assert [len(document) for document in cut.row.documents] == [6, 6]
    assert read(PairRows, pair, max_tokens=4, overlong="cut").fault == "overlong"
    steps = {"prompt": "p", "completions": ["abc", "d"], "labels": [-100, 1]}
    assert read(StepRows, steps, max_tokens=6, overlong="cut").row.documents[0].steps == (3, 5)
    assert read(StepRows, steps, max_tokens=5, overlong="cut").fault == "overlong"  # what is left has no label


def test_ties_are_left_out(plain_tokenizer, write):
    encoder = Encoder(OfflineConfig(), plain_tokenizer, PairRows)
    table = encoder.open(write("s.jsonl", [{"text": "a", "label": [0]}, {"text": "b", "label": [0]}]))
    (outcome,) = encoder.read([(0, table[0])])
    assert (outcome.row, outcome.fault) == (None, "tie")


def test_faults_name_file_line_and_cause(read, plain_tokenizer):
    def message(*args: Any, **settings: Any) -> str:
        found = read(*args, **settings)
        assert (found.row, found.fault) == (None, "malformed")
        assert found.message.startswith("f.jsonl:3: ")
        return found.message

    assert "needs a chat template, and the tokenizer has none" in message(TextRows, {"messages": TURNS})
    assert "every character of the text?" in message(TextRows, {"prompt": "é", "completion": "b"})
    assert "data.system is set, but this is plain text" in message(TextRows, {"text": "a"}, system="x")
    refusing = PREFIXES + "{{ raise_exception('no systems') }}"
    assert "failed on turns (system, user" in message(TextRows, {"messages": TURNS}, template=refusing)
    thinking = [TURNS[1], {"role": "assistant", "content": "hm:yo"}, TURNS[3], TURNS[4]]
    found = message(TextRows, {"messages": thinking}, template=FORGETFUL)
    assert "renders turn 2 (assistant) otherwise with and without the text after it" in found
    # A template that asks for a thought that the answer does not have.
    asking = PREFIXES.replace("{{ '[a]' }}", "{{ '[a]?' }}")
    found = message(TextRows, {"messages": TURNS}, template=asking)
    assert "with and without the text before it" in found
    stripped = PREFIXES.replace("turn.content", "turn.content.replace('humor', 'h')")
    labelled = [{"from": "User", "value": "hi"}, {"from": "Assistant", "value": "yo", "label": "humor:4"}]
    record = {"conversations": labelled, "mask": "User", "type": "VALUE_TO_TEXT"}
    assert "changes the label 'humor:4'" in message(TextRows, record, template=stripped)
    steps = {"prompt": "p", "completions": ["humor", "c"], "labels": [1, 0]}
    assert "changes the text of the steps" in message(StepRows, steps, template=stripped)
    high = {
        "tokens": [1],
        "labels": [99],
        "loss_mask": [1],
        "topk_logits": [[1]],
        "topk_token_ids": [[3]],
        "log_sum_exp_logits": [2],
    }
    assert f"token id 99, and the tokenizer has {len(plain_tokenizer)} tokens" in message(TopKRows, high)


def test_one_bad_text_leaves_the_others(plain_tokenizer):
    encoder = Encoder(OfflineConfig(), plain_tokenizer, TextRows)
    fields = [{"text": "ab"}, {"text": "é"}, {"txt": "c"}, {"text": "cd"}]
    outcomes = encoder.read([(i, Record(f, f"f:{i}")) for i, f in enumerate(fields)])
    assert [outcome.fault for outcome in outcomes] == ["", "malformed", "malformed", ""]
    assert [outcome.row.index for outcome in outcomes if outcome.row] == [0, 3]
    assert outcomes[3].row is not None
    assert outcomes[3].row.documents[0].tokens.tolist() == [3, 4, 0]


def test_a_gap_can_be_required(plain_tokenizer):
    encoder = Encoder(OfflineConfig(), plain_tokenizer, PairRows, needs_gap=True)
    record = {"prompt": "a", "chosen": "b", "rejected": "c"}
    good, bad = encoder.read([(0, Record({**record, "margin": 0}, "f:1")), (1, Record(record, "f:2"))])
    assert good.row is not None
    assert bad.message.startswith("f:2: the loss reads by how much the chosen answer is better, and the record has")


def test_system_message_and_template_file(documents, chat_tokenizer, tmp_path):
    record = {"messages": TURNS[1:3]}
    assert documents(TextRows, record, template=PREFIXES, system="s") == ["[s]s<end>\n[u]hi<end>\n[a]{yo<end>}\n"]
    assert documents(TextRows, {"messages": TURNS[:3]}, template=PREFIXES, system="x")[0].startswith("[s]s<end>")
    kwargs = PREFIXES.replace("'[a]'", "mark").replace(
        "'[' + turn.role[0] + ']'", "(mark if turn.role == 'assistant' else '')"
    )
    file = tmp_path / "t.jinja"
    file.write_text(kwargs)
    found = documents(TextRows, record, template="-", chat_template=str(file), template_kwargs={"mark": "A:"})
    assert found == ["hi<end>\nA:{yo<end>}\n"]
    file.write_text(" ")
    with pytest.raises(DataError, match=r"t\.jinja: empty chat template"):
        Encoder(OfflineConfig(chat_template=str(file)), chat_tokenizer, TextRows)


def test_documents_are_cut_and_asked_for_their_prompt():
    document = Document(np.arange(5, dtype=np.int32), np.array([False, False, True, False, True]), (2, 4))
    assert document.prompt.tolist() == [0, 1]
    short = document.cut(4)
    assert (len(short), short.steps) == (4, (2,))
    assert dataclasses.replace(document, mask=np.zeros(5, bool)).prompt.tolist() == [0, 1, 2, 3, 4]


def test_special_tokens_in_the_text_are_recognised(documents):
    assert AddedToken("<eos>").content == "<eos>"
    assert documents(TextRows, {"prompt": "a<eos>b", "completion": "c"}) == ["a<eos>b{c<eos>}"]
    # An end inside an answer does not end its learned part.
    assert documents(TextRows, {"prompt": "a", "completion": "b<eos>c"}) == ["a{b<eos>c<eos>}"]
