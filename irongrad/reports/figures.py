"""The charts of the report, as figures of plotly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
import plotly.io

from irongrad.analysis.machine import Machine
from irongrad.analysis.records import Judged
from irongrad.analysis.totals import Work
from irongrad.reports.amounts import amount, nbytes, unit_of
from irongrad.reports.fusion_groups import FusionGroup
from irongrad.reports.memory_over_time import KEPT, RECOMPUTED, MemoryOverTime
from irongrad.reports.model_tree import Module, modules_of
from irongrad.reports.profile import Profile
from irongrad.reports.report import Report

PHASES, MODULES, PASSES, MEMORY, ROOFLINE, TIMES = "phases", "modules", "passes", "memory", "roofline", "times"
ERRORS = "errors"

# They stand out on a light and on a dark page.
COLOURS = {
    "forward": "#4c6ef5",
    "backward": "#f08c00",
    "update": "#37b24d",
    "evaluation": "#9775fa",
    KEPT: "#22b8cf",
    RECOMPUTED: "#f06595",
}
_OTHER = "#868e96"
_FEW, _MANY = "#a5b4fc", "#3730a3"  # operations a byte

_NAMES = 4  # of the values of one moment that its label shows
_CLEAR = "rgba(0,0,0,0)"


def templates() -> dict[str, Any]:
    """The look of the charts on a light and on a dark page."""
    return {"light": _template("plotly_white"), "dark": _template("plotly_dark")}


def figures(report: Report) -> dict[str, Any]:
    """The charts of a report by name. The memory of a function is under `memory.` and its number."""
    found = {PHASES: _phases(report), MODULES: _modules(report.model), PASSES: _passes(report)}
    for number, memory in enumerate(report.memory):
        if memory.peak:
            found[f"{MEMORY}.{number}"] = _memory(memory)
    if report.judged:
        found[ERRORS] = _errors(report.judged)
    if report.profile is not None:
        found[TIMES] = _times(report.profile)
    if report.machine is not None:
        found[ROOFLINE] = _roofline(report.groups, report.machine)
    return {name: _plain(figure) for name, figure in found.items()}


def _template(base: str) -> dict[str, Any]:
    layout = plotly.io.templates[base].layout.to_plotly_json()
    font = layout["font"] | {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif"}
    clear = {"paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR, "modebar": {"bgcolor": _CLEAR, "color": _OTHER}}
    margin = {"l": 72, "r": 16, "t": 16, "b": 48}
    return {"layout": layout | clear | {"font": font, "margin": margin, "colorway": [*COLOURS.values(), _OTHER]}}


def _plain(figure: go.Figure) -> dict[str, Any]:
    """A figure without a template, which the page gives it."""
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    figure.update_layout(template=None, legend=legend)
    plain: dict[str, Any] = figure.to_plotly_json()
    return {"data": plain["data"], "layout": plain["layout"]}


def _phases(report: Report) -> go.Figure:
    """How each measure divides among the phases."""
    measures: dict[str, Callable[[Work], int]] = {
        "operators": lambda work: work.count,
        "FLOP": lambda work: work.flops or 0,
        "bytes, eager": lambda work: work.nbytes,
    }
    figure = go.Figure()
    order = {name: number for number, name in enumerate(COLOURS)}
    for phase in sorted(report.phases, key=lambda work: order.get(work.name, len(order))):
        shares = [_share(of(phase), of(report.captured)) for of in measures.values()]
        figure.add_bar(
            y=list(measures),
            x=shares,
            name=_text(phase.name),
            marker={"color": COLOURS.get(phase.name, _OTHER)},
            orientation="h",
            text=[f"{share:.0%}" if share >= 0.04 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate="%{y}: %{x:.1%}",
        )
    figure.update_layout(barmode="stack", height=220, xaxis={"tickformat": ".0%", "range": [0, 1]})
    figure.update_yaxes(autorange="reversed")
    return figure


def _errors(judged: Sequence[Judged]) -> go.Figure:
    """How near each verified value is to its bound."""
    figure = go.Figure()
    for kind in dict.fromkeys(value.key.partition("/")[0] for value in judged):
        shares = [value.error / value.allowed for value in judged if value.key.partition("/")[0] == kind]
        figure.add_histogram(x=shares, name=_text(kind), xbins={"start": 0, "end": 1.0001, "size": 0.02})
    figure.update_layout(barmode="stack", height=240, xaxis={"title": "error / bound", "tickformat": ".0%"})
    figure.update_xaxes(range=[0, 1])
    return figure.update_yaxes(title="values")


def _modules(model: Module) -> go.Figure:
    """The bytes that the kernels of each module read and write."""
    rows = [module for module in modules_of(model) if module.compiled.nbytes]
    figure = go.Figure(
        go.Icicle(
            ids=[_text(module.path or module.name) for module in rows],
            labels=[_text(module.name) for module in rows],
            parents=[_parent(module, model) for module in rows],
            values=[module.compiled.nbytes for module in rows],
            text=[nbytes(module.compiled.nbytes) for module in rows],
            customdata=[[amount(module.compiled.flops, "OP"), module.compiled.count] for module in rows],
            marker={
                "colors": [math.log10(1 + (module.compiled.intensity or 0)) for module in rows],
                "colorscale": [[0, _FEW], [1, _MANY]],
                "line": {"width": 1, "color": "#ffffff"},
            },
            branchvalues="total",
            maxdepth=5,
            sort=False,
            tiling={"orientation": "h"},
            texttemplate="%{label}<br>%{percentRoot:.0%}",
            hovertemplate="%{id}<br>%{text}, %{customdata[0]}, %{customdata[1]} launches<extra></extra>",
        )
    )
    return figure.update_layout(height=420, margin={"l": 0, "r": 0, "t": 8, "b": 8})


def _parent(module: Module, model: Module) -> str:
    if module is model:
        return ""
    return _text(module.path.rpartition(".")[0] or model.name)


def _passes(report: Report) -> go.Figure:
    """The nodes of each function before the passes, and after them."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for change in report.passes:
        first.setdefault(change.function, change.before)
        last[change.function] = change.after
    names = list(map(_text, first))
    figure = go.Figure()
    for title, counts in (("before all passes", first), ("after all passes", last)):
        figure.add_bar(x=names, y=list(counts.values()), name=title, hovertemplate="%{y:,} nodes")
    figure.update_layout(barmode="group", height=320, yaxis={"title": "nodes", "tickformat": ","})
    figure.update_xaxes(type="category")
    return figure


def _memory(memory: MemoryOverTime) -> go.Figure:
    """The live bytes at each moment, by what they are for."""
    divisor, unit = unit_of(memory.peak)
    figure = go.Figure()
    for kind in sorted(memory.live, key=lambda kind: kind != KEPT):
        figure.add_scatter(
            y=[round(count / divisor, 4) for count in memory.live[kind]],
            name=_text(kind),
            stackgroup="live",
            line={"width": 0.5, "shape": "hv", "color": COLOURS.get(kind, _OTHER)},
            hovertemplate=f"%{{y:,.1f}} {unit}",
        )
    figure.add_scatter(
        y=[0] * len(memory.kernels),
        name="computes",
        customdata=list(map(_moment, memory.kernels)),
        hovertemplate="%{customdata}",
        mode="lines",
        line={"width": 0},
        showlegend=False,
    )
    figure.add_vline(memory.moment, line_dash="dot", line_color=_OTHER, annotation_text="peak")
    figure.update_layout(
        height=360,
        hovermode="x unified",
        xaxis={"title": "moment of the schedule", "unifiedhovertitle": {"text": "moment %{x}"}},
        yaxis={"title": f"live {unit}", "rangemode": "tozero"},
    )
    return figure


def _moment(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return _text(", ".join(names[:_NAMES]) + more) or "nothing runs"


def _roofline(groups: tuple[FusionGroup, ...], machine: Machine) -> go.Figure:
    """The kernels under the roof of the machine: at their measured speed, or else at the most that they can reach."""
    shown = [group for group in groups if group.work.flops and group.work.nbytes]
    figure = go.Figure()
    intensities = [group.work.intensity or 0.0 for group in shown]
    least, most = min([*intensities, machine.ridge / 10]) / 2, max([*intensities, machine.ridge * 10]) * 2
    xs = [least, machine.ridge, most]
    figure.add_scatter(
        x=xs,
        y=[machine.attainable(x) for x in xs],
        mode="lines",
        name="the most that the machine reaches",
        line={"color": _OTHER},
        hovertemplate="%{y:.3s}OP/s at %{x:.3g} operations a byte<extra></extra>",
    )
    for bound, colour in (("memory", COLOURS[KEPT]), ("arithmetic", COLOURS["backward"])):
        of_bound = [group for group in shown if group.bound == bound]
        if of_bound:
            _add_kernels(figure, of_bound, machine, name=f"kernels bound by {bound}", colour=colour)
    figure.update_layout(
        height=460,
        xaxis={"title": "arithmetic intensity, operations a byte", "type": "log", "dtick": 1},
        yaxis={"title": "operations a second", "type": "log", "tickformat": "~s", "dtick": 1},
    )
    return figure


def _add_kernels(figure: go.Figure, groups: list[FusionGroup], machine: Machine, *, name: str, colour: str) -> None:
    largest = max(group.least_seconds or 0.0 for group in groups)
    sizes = [8 + 20 * math.sqrt((group.least_seconds or 0.0) / largest) for group in groups]
    figure.add_scatter(
        x=[group.work.intensity for group in groups],
        y=[_speed(group, machine) for group in groups],
        mode="markers",
        name=name,
        marker={"size": sizes, "color": colour, "opacity": 0.75},
        customdata=[list(_about(group)) for group in groups],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}, %{customdata[2]}, %{customdata[3]} launches<br>"
        "%{x:.3g} operations a byte, %{y:.3s}OP/s<extra></extra>",
    )


def _speed(group: FusionGroup, machine: Machine) -> float:
    if group.seconds:
        return (group.work.flops or 0) / group.seconds
    return machine.attainable(group.work.intensity or 0.0)


def _about(group: FusionGroup) -> Iterator[str]:
    yield from (
        _text(group.work.name),
        amount(group.work.flops, "OP"),
        nbytes(group.work.nbytes),
        f"{group.work.count:,}",
    )


def _times(profile: Profile) -> go.Figure:
    """The launches of one step over time, each phase in a row of its own."""
    figure = go.Figure()
    order = {name: number for number, name in enumerate(COLOURS)}
    for phase in sorted({span.phase for span in profile.spans}, key=lambda name: order.get(name, len(order))):
        spans = [span for span in profile.spans if span.phase == phase]
        name = _text(phase or "unknown")
        figure.add_bar(
            base=[1e3 * span.start for span in spans],
            x=[1e3 * span.seconds for span in spans],
            y=[name] * len(spans),
            name=name,
            orientation="h",
            marker={"color": COLOURS.get(phase, _OTHER), "line": {"width": 0}},
            customdata=[
                [_text(span.kernel), _text(span.module), _text(span.line), 1e6 * span.seconds] for span in spans
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} %{customdata[2]}<br>%{customdata[3]:,.1f} µs"
            "<extra></extra>",
            showlegend=False,
        )
    figure.update_layout(barmode="overlay", height=260, xaxis={"title": "ms since the first launch"})
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _text(text: str) -> str:
    """`text` as plotly shows it literally: it reads tags and entities in labels."""
    return escape(text)
