"""The report of a replay as one HTML page that needs nothing else, plots by plotly.

Knows the outcome of a replay; must not know files, text or the drafter.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import Any

import numpy as np

from drafter_core.simulate import CostModel, Outcome

__all__ = ["page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td { padding: .15rem 1rem .15rem 0 }
td:last-child { font-variant-numeric: tabular-nums }
.note { color: #555 }
"""
BLUE, GREY, RED = "#3366aa", "#bbbbbb", "#bb4444"


def page(name: str, outcome: Outcome, costs: CostModel, report: dict[str, Any]) -> str:
    """The page.

    Args:
        name: what was replayed.
        outcome: what was counted.
        costs: what a step takes.
        report: the same as `drafter-core simulate --json` prints.
    """
    plots = [
        ("Acceptance by position in the draft", _by_position(outcome),
         "Share of the drafts that reach a position and are right up to it."),
        ("Acceptance by length of the match", _by_match(outcome),
         "Drafts that rest on a longer match are right more often."),
        ("Tokens per step over time", _course(outcome),
         "It rises while the cache learns what the responses have in common."),
        ("Expected speed-up by the cost of a verified token", _speed_up(outcome, costs),
         f"With {costs.step_ms:g} ms a step. Below 1, drafting costs more than it saves."),
        ("Time to append and draft, per step", _times(outcome),
         "Measured here, for the whole batch."),
    ]  # fmt: skip
    io = import_module("plotly.io")
    parts = []
    for number, (title, figure, note) in enumerate(plots):
        drawn = io.to_html(figure, full_html=False, include_plotlyjs=number == 0)
        parts.append(f"<h2>{escape(title)}</h2><p class=note>{escape(note)}</p>{drawn}")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{escape(name)}: suffix drafting</title><style>{STYLE}</style>"
        f"<h1>What suffix drafting would gain on {escape(name)}</h1>"
        f"{_summary(outcome, report)}{''.join(parts)}{_skipped(report)}</html>"
    )


def _summary(outcome: Outcome, report: dict[str, Any]) -> str:
    settings, costs = report["settings"], report["cost_model"]
    rows = {
        "Expected speed-up": f"{costs['speed_up']:.2f} ({costs['step_ms']:g} ms a step, "
        f"{costs['verify_us']:g} µs a verified token)",
        "Tokens per step": f"{outcome.tokens_per_step:.2f}",
        "Accepted": f"{outcome.accepted:,} of {outcome.drafted:,} drafted tokens "
        f"({outcome.acceptance_rate:.1%})",
        "Steps": f"{outcome.steps:,} instead of {outcome.plain_steps:,}",
        "Requests": f"{outcome.requests:,}, {outcome.response_tokens:,} response tokens",
        "Drafting": f"{report['draft_us_per_step']['median']:.0f} µs a step (median)",
        "Starting and ending requests": f"{report['start_and_end_us_per_request']:.0f} µs each",
        "Memory": f"{outcome.bytes_in_use / 1e6:.1f} MB, {outcome.cached_tokens:,} cached tokens",
        "Settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
    }
    cells = "".join(f"<tr><td>{escape(k)}<td>{escape(v)}" for k, v in rows.items())
    return f"<table>{cells}</table>"


def _skipped(report: dict[str, Any]) -> str:
    skipped = report["skipped"]
    if not skipped:
        return ""
    items = "".join(f"<li value={one['line']}>{escape(one['reason'])}" for one in skipped[:200])
    more = f"<p>… and {len(skipped) - 200:,} more." if len(skipped) > 200 else ""
    return f"<h2>{len(skipped):,} lines were skipped</h2><ol>{items}</ol>{more}"


def _figure(*traces: Any, x: str, y: str) -> Any:
    go = import_module("plotly.graph_objects")
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="simple_white", height=340, margin={"l": 60, "r": 60, "t": 20, "b": 50},
        xaxis_title=x, yaxis_title=y, legend={"orientation": "h", "y": 1.15}, barmode="overlay",
    )  # fmt: skip
    return figure


def _shares(accepted: Any, drafted: Any) -> list[float | None]:
    return [a / d if d else None for a, d in zip(accepted.tolist(), drafted.tolist(), strict=True)]


def _by_position(outcome: Outcome) -> Any:
    go = import_module("plotly.graph_objects")
    reached = np.flatnonzero(outcome.drafted_at)
    last = int(reached[-1]) + 1 if len(reached) else 0
    drafted, accepted = outcome.drafted_at[:last], outcome.accepted_at[:last]
    figure = _figure(
        go.Bar(x=list(range(1, last + 1)), y=_shares(accepted, drafted), marker_color=BLUE,
               customdata=drafted.tolist(),
               hovertemplate="position %{x}: %{y:.1%} of %{customdata:,} drafts<extra></extra>"),
        x="position", y="accepted",
    )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    return figure


def _by_match(outcome: Outcome) -> Any:
    go = import_module("plotly.graph_objects")
    lengths = np.flatnonzero(outcome.drafts_by_match)
    drafted, accepted = outcome.drafted_by_match[lengths], outcome.accepted_by_match[lengths]
    x = lengths.tolist()
    figure = _figure(
        go.Bar(x=x, y=drafted.tolist(), name="drafted tokens", marker_color=GREY, yaxis="y2"),
        go.Scatter(x=x, y=_shares(accepted, drafted), name="acceptance rate", mode="lines+markers",
                   line_color=BLUE),
        x="tokens of context that match", y="accepted",
    )  # fmt: skip
    figure.update_layout(
        yaxis={"tickformat": ".0%", "range": [0, 1], "overlaying": "y2"},
        yaxis2={"side": "right", "title": "drafted tokens", "showgrid": False},
    )
    return figure


def _course(outcome: Outcome) -> Any:
    go = import_module("plotly.graph_objects")
    x = [tokens for tokens, _ in outcome.course]
    y = [value for _, value in outcome.course]
    figure = _figure(
        go.Scatter(x=x, y=y, mode="lines", line_color=BLUE), x="response tokens", y="tokens a step"
    )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _speed_up(outcome: Outcome, costs: CostModel) -> Any:
    go = import_module("plotly.graph_objects")
    most = max(1000.0, 2 * costs.verify_us)
    x = np.linspace(0, most, 101).tolist()
    figure = _figure(
        go.Scatter(x=x, y=[outcome.speed_up(CostModel(costs.step_ms, cost)) for cost in x],
                   mode="lines", line_color=BLUE, name="speed-up"),
        go.Scatter(x=[costs.verify_us], y=[outcome.speed_up(costs)], mode="markers",
                   marker={"color": RED, "size": 10}, name="as given"),
        x="µs a verified token adds to a step", y="speed-up",
    )  # fmt: skip
    figure.add_hline(y=1, line_dash="dot", line_color=GREY)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _times(outcome: Outcome) -> Any:
    go = import_module("plotly.graph_objects")
    times = np.array(outcome.step_microseconds)
    edge = float(np.percentile(times, 99.5)) if len(times) else 0.0
    counts, edges = np.histogram(times[times <= edge], bins=60)
    return _figure(
        go.Bar(x=((edges[:-1] + edges[1:]) / 2).tolist(), y=counts.tolist(), marker_color=BLUE),
        x="µs (the slowest 0.5 % left out)", y="steps",
    )  # fmt: skip
