"""Which metrics share a chart, and in which order a reader wants them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from yatt_jax.report.charts import Line, line_chart
from yatt_jax.report.markup import broad, card, legend
from yatt_jax.report.read import Run


@dataclasses.dataclass(frozen=True)
class Headline:
    """The figure that a run is judged by.

    Attributes:
      what: "reward" or "loss".
      training: name of the metric in training.
      higher: whether a higher one is better.
    """

    what: str
    training: str
    higher: bool

    @property
    def held_out(self) -> str:
        """Name of the metric on what is held out."""
        return f"eval/{self.what}"

    @property
    def margin(self) -> str:
        """Half-width of its confidence interval."""
        return f"{self.held_out}_ci95"

    @property
    def names(self) -> set[str]:
        """All three metrics."""
        return {self.training, self.held_out, self.margin}


def judged_by(run: Run) -> Headline:
    """The reward where a run has one, else the loss."""
    reward, names = Headline("reward", "rollout/reward", higher=True), run.names()
    if not reward.names.isdisjoint(names):
        return reward
    training = next((name for name in names if re.fullmatch(r"train/\w+/loss", name)), "train/loss")
    return Headline("loss", training, higher=False)


@dataclasses.dataclass(frozen=True)
class Panel:
    """A chart of the page.

    Attributes:
      title: above the chart.
      pattern: the metrics it shows: those whose name this matches and that no earlier panel took.
    """

    title: str
    pattern: str


PANELS = (
    Panel("Single rewards", r"/reward/"),
    Panel("KL to the reference, a token", r"/(kl|kl_k[123])$"),
    Panel("KL to the reference, a response", r"/kl_response$"),
    Panel("KL of an update", r"/kl_update$"),
    Panel("Entropy", r"/entropy(_sampled)?$"),
    Panel("Importance ratio, mean", r"/ratio(_mean)?$"),
    Panel("Importance ratio, extremes", r"/ratio_(max|min)$"),
    Panel("Clipped tokens", r"/(\w+_)?clip_fraction$"),
    Panel("Response length", r"/(response_length|length)$"),
    Panel("Responses that ended by themselves", r"/ended$"),
    Panel("Accuracy", r"/accuracy(_(right|wrong))?$"),
    Panel("Rewards of responses", r"/reward_(chosen|rejected)$"),
    Panel("Reward of the chosen over the rejected response", r"/margin$"),
    Panel("Negative log-likelihood, a token", r"/nll$"),
    Panel("Divergence from the teacher, a token", r"/divergence$"),
    Panel("Policy loss", r"(/policy_loss|actor/loss)$"),
    Panel("Value loss", r"(/value_loss|critic/loss)$"),
    Panel("Explained variance", r"/explained_variance$"),
    Panel("Values, returns, advantages", r"/(value|return|advantage)$"),
    Panel("Gradient norm", r"/grad_norm$"),
    Panel("Learning rate", r"/(lr|learning_rate)$"),
    Panel("Spread of rewards", r"/reward_std$"),
    Panel("Groups without signal", r"/groups_without_signal$"),
    Panel("Tokens a second", r"/tokens_per_s(econd)?$"),
    Panel("Share of time waited for other processes", r"/waited(_max)?$"),
    Panel("Re-partition, bytes", r"/repartition_(peak_)?bytes$"),
    Panel("Cost of data shards, largest by mean", r"/shard_spread(_before)?$"),
    Panel("Sampler against trainer, probability difference", r"/probability_difference$"),
)


def headline_chart(runs: Sequence[Run]) -> str:
    """The headline curve: training reward (or loss) in the background, the held-out one on top."""
    lines, what = headline_lines(runs), judged_by(runs[0]).what
    return f"{legend(headline_legend(lines, runs))}{broad(line_chart(lines, 960, 270, f'{what} by step'))}"


def headline_legend(lines: Sequence[Line], runs: Sequence[Run]) -> list[tuple[str, int, str]]:
    """Names of the headline curve's lines, held-out ones first; of several runs, one name each where it can be."""
    ordered = sorted(lines, key=lambda line: line.style == "faint")
    named = [line for line in ordered if len(runs) == 1 or line.style != "faint"]
    return [(line.label + (", 95 % interval" if line.margin else ""), line.colour, line.style) for line in named]


def headline_lines(runs: Sequence[Run]) -> list[Line]:
    """Lines of the headline curve, those in the background first."""
    one = len(runs) == 1
    behind, front = [], []
    for colour, run in enumerate(runs):
        headline = judged_by(run)
        training, held_out = run.points(headline.training), run.points(headline.held_out)
        label = "" if one else f"{run.name}: "
        style = "faint" if held_out else "solid"
        if training:
            behind.append(Line(f"{label}training", training, 1 if one and held_out else colour, style))
        if held_out:
            margin = dict(run.points(headline.margin)) if one else {}
            style = "dots" if len(held_out) <= 60 else "solid"
            front.append(Line(f"{label}held-out", held_out, colour, style, margin))
    return behind + front


def curves(runs: Sequence[Run]) -> str:
    """A grid of charts for the metrics that have a panel."""
    out = []
    for title, names in _assign(runs):
        if len(runs) == 1:
            out.append(_card(title, [_line(runs[0], name, colour) for colour, name in enumerate(names)]))
        else:
            for name in names:
                heading = title if len(names) == 1 else f"{title}: {name}"
                out.append(_card(heading, [_line(run, name, i, run.name) for i, run in enumerate(runs)]))
    return f'<div class="grid">{"".join(out)}</div>' if out else ""


def remaining(runs: Sequence[Run]) -> str:
    """Charts of every other metric, one each."""
    taken = {name for _, names in _assign(runs) for name in names} | _headlines(runs)
    cards = []
    for name in _names(runs):
        if name not in taken and not name.startswith("time/"):
            several = len(runs) > 1
            cards.append(_card(name, [_line(r, name, i, r.name if several else name) for i, r in enumerate(runs)]))
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.names()))


def _headlines(runs: Sequence[Run]) -> set[str]:
    return {name for run in runs for name in judged_by(run).names}


def _assign(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    shown = _headlines(runs)
    left = [name for name in _names(runs) if name not in shown and not name.startswith("time/")]
    found = []
    for panel in PANELS:
        names = [name for name in left if re.search(panel.pattern, name)]
        alone = panel.pattern == "/reward/" and len({name.rpartition("/")[2] for name in names}) == 1
        if names and not alone:  # a single reward is the total, which has the first chart
            found.append((panel.title, names))
            left = [name for name in left if name not in names]
    return found


def _line(run: Run, name: str, colour: int, label: str = "") -> Line:
    points = run.points(name)
    few = len(points) <= 60 and (name.startswith("eval/") or len(points) <= 3)
    return Line(label or name, points, colour, "dots" if few else "solid")


def _card(title: str, lines: list[Line]) -> str:
    shown = [line for line in lines if line.points]
    named = ""
    if len(shown) > 1 or (shown and shown[0].label != title and "/" in shown[0].label):
        named = legend((line.label, line.colour, "") for line in shown)
    return card(f"{named}{line_chart(shown, label=title)}", title)
