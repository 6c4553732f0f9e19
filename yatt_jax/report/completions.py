"""Completions on the page: before and after training, and the samples of the last step."""

from __future__ import annotations

from collections.abc import Sequence

from yatt_jax.report.markup import card, cell, fold, table
from yatt_jax.report.media import Shown
from yatt_jax.report.read import Run
from yatt_jax.report.samples import Record, pairs, pick, shown_prompt
from yatt_jax.report.text import number, safe

PAIRS_SHOWN = 6
PAIRS_FOLDED = 24
TABLE_ROWS = 12
TEXT_LIMIT = 4000  # characters of one text on the page; samples.jsonl has it all


def before_and_after(run: Run) -> str:
    """The same held-out prompts, answered by the first and by the last policy; the first prompts, not chosen ones."""
    found = pairs(run.held_out)
    if not found:
        if not run.held_out:
            return ""
        shown = sorted(run.held_out, key=lambda r: (r.get("prompt_index", 0), r.get("sample_id", 0)))[:PAIRS_SHOWN]
        note = f"Held-out prompts were answered once, at step {shown[0]['step']}."
        media = Shown(run.path)
        return f'<p class="soft small">{note}</p>' + "".join(_card([("", record)], media) for record in shown)
    first, last = found[0][0]["step"], found[0][1]["step"]
    better = sum(1 for a, b in found if (_total(b) or 0.0) > (_total(a) or 0.0))
    worse = sum(1 for a, b in found if (_total(b) or 0.0) < (_total(a) or 0.0))
    note = (
        f"The first held-out prompts in order, none of them picked. Of {len(found)} answers logged at both steps, "
        f"{better} score higher after training and {worse} lower."
    )
    media = Shown(run.path)
    cards = [_card([(f"step {first}", a), (f"step {last}", b)], media) for a, b in found[:PAIRS_FOLDED]]
    more = ""
    if folded := cards[PAIRS_SHOWN:]:
        more = fold(f"{len(folded)} more", "".join(folded))
    return f'<p class="soft small">{note}</p>{"".join(cards[:PAIRS_SHOWN])}{more}'


def sample_table(run: Run) -> str:
    """Training samples of the last step that logged any, spread from the best to the worst."""
    if not run.last:
        return ""
    shown = pick(run.last, TABLE_ROWS)
    names = list(dict.fromkeys(name for r in shown for name in _rewards(r)))
    single = [] if len(names) == 1 else names  # a single reward is the total
    head = ["prompt", "completion", *single, "reward", "advantage", "end", "tokens"]
    rows, media = [], Shown(run.path)
    for record in shown:
        figures = [number(_rewards(record).get(name)) for name in single]
        figures += [f'<span class="score">{number(_total(record))}</span>', number(_number(record.get("advantage")))]
        cells = [
            cell(media.of(record) + _text(shown_prompt(record), 600)),
            cell(_text(record["completion"], TEXT_LIMIT)),
            *(cell(figure, "n") for figure in figures),
            cell(safe(record.get("finish", "")), "soft"),
            cell(safe(record.get("length", "")), "n"),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = f"Step {shown[0]['step']}: {len(shown)} of {len(run.last)} logged samples, evenly over the order of rewards."
    made = table(rows, head, numeric=(*single, "reward", "advantage", "tokens"))
    return f'<p class="soft small">{note}</p>{made}'


def _card(answers: Sequence[tuple[str, Record]], media: Shown) -> str:
    says = []
    for label, record in answers:
        parts = [f"<span>{safe(label)}</span>"] if label else []
        parts.append(f'<span>reward <span class="score">{number(_total(record))}</span></span>')
        rewards = _rewards(record)
        if len(rewards) > 1:
            parts += [f"<span>{safe(name)} {number(value)}</span>" for name, value in rewards.items()]
        if record.get("finish") == "length":
            parts.append("<span>cut at the length limit</span>")
        says.append(
            f'<div class="says"><header>{"".join(parts)}</header>{_text(record["completion"], TEXT_LIMIT)}</div>'
        )
    record = answers[0][1]
    asked = f'{media.of(record)}<div class="soft small">{_text(shown_prompt(record), 1200)}</div>'
    return card(f'{asked}<div class="two">{"".join(says)}</div>', kind="pair")


def _text(text: str, limit: int) -> str:
    cut = text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
    return f'<div class="text" dir="auto">{safe(cut)}</div>' if cut else '<div class="soft">(empty)</div>'


def _total(record: Record) -> float | None:
    return _number(record.get("total"))


def _rewards(record: Record) -> dict[str, float | None]:
    rewards = record.get("rewards")
    return {str(k): _number(v) for k, v in rewards.items()} if isinstance(rewards, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
