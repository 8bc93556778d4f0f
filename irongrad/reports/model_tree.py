"""The modules of a model as a tree, down to the operators and kernels of each line, with their work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from irongrad.analysis.records import Analysis, Source, TargetRecord
from irongrad.analysis.totals import Work, executed, kernel_name, operators_of, source_of_launch, work_of
from irongrad.reports.profile import Profile

MODEL, LOSS, OUTSIDE, UNKNOWN = "model", "loss", "outside of modules", "unknown origin"

# The paths of modules by which a `Source` names the model itself and its loss.
_ROOT, _LOSS = "(model)", "(loss)"
# The phases that belong to no module.
_APART = frozenset({"update", "check"})

_UNKNOWN = Source("", "", "", "", "")


@dataclass(frozen=True)
class OperatorRow:
    """Equal operators of one line, as captured.

    Attributes:
        phase: the phase of the step that they belong to.
        dtype: numpy's name of their result's element type.
        shape: the dimensions of their result; empty if they vary.
        work: their work, under the operator's name.
    """

    phase: str
    dtype: str
    shape: tuple[int, ...]
    work: Work

    @property
    def of_phase(self) -> Work:
        """Its work, under the name of its phase."""
        return replace(self.work, name=self.phase)


@dataclass(frozen=True)
class KernelRow:
    """The launches of a kernel for one line.

    Attributes:
        phase: the phase of the step that they belong to.
        work: their work, under the kernel's name; `copy` for copies.
        seconds: their time in one step; None without a profile, and for copies.
    """

    phase: str
    work: Work
    seconds: float | None


@dataclass(frozen=True)
class Line:
    """A line of the user's code, in one module.

    Attributes:
        place: the line, as `net.py:12`; empty if unknown.
        text: what stands there; empty if unknown.
        operators: its operators, in program order.
        kernels: the kernels whose form its operators gave, in program order.
    """

    place: str
    text: str
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]


@dataclass(frozen=True)
class Module:
    """A module, or a part of the step outside of modules, with all that is inside it.

    Attributes:
        name: the last part of its path.
        path: the whole path.
        captured: the work of its operators, as captured.
        compiled: the work of its launches.
        phases: the work of its operators, as captured, by phase.
        seconds: the time of its launches in one step; None without a profile.
        lines: the lines of its own code.
        children: the modules inside it, in program order.
    """

    name: str
    path: str
    captured: Work
    compiled: Work
    phases: tuple[Work, ...]
    seconds: float | None
    lines: tuple[Line, ...]
    children: tuple[Module, ...]


@dataclass
class _Branch:
    """A module that is being filled: its operators and launches by line."""

    children: dict[str, _Branch] = field(default_factory=dict)
    operators: dict[str, dict[tuple[str, str, str, tuple[int, ...]], Work]] = field(default_factory=dict)
    kernels: dict[str, dict[tuple[str, str], Work]] = field(default_factory=dict)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))

    def at(self, path: tuple[str, ...]) -> _Branch:
        branch = self
        for name in path:
            branch = branch.children.setdefault(name, _Branch())
        return branch


def model_tree(analysis: Analysis, record: TargetRecord, entry: str, profile: Profile | None) -> Module:
    """The work of one call of `entry`, from the whole step down to the operators and kernels of each line.

    Args:
        analysis: the record of the artifact.
        record: that of the target.
        entry: the symbol of an entry point.
        profile: the profile of the entry point, if there is one.
    """
    root = _Branch()
    for operator, source, times in operators_of(analysis, entry):
        work = work_of(operator, times, source.operator)
        key = (source.phase, source.operator, operator.dtype, operator.shape)
        _add(root.at(path_of(source)).operators.setdefault(source.line, {}), key, work)
    for one in executed(record, entry):
        found = source_of_launch(record, one.launch) or _UNKNOWN
        work = one.work(record, kernel_name(record, one.launch))
        _add(root.at(path_of(found)).kernels.setdefault(found.line, {}), (work.name, found.phase), work)
    for span in profile.spans if profile else ():
        source = Source("", span.phase, "", span.module, span.line)
        root.at(path_of(source)).seconds[span.line, span.kernel, span.phase] += span.seconds
    return _frozen(root, "step", (), analysis.lines, timed=profile is not None)


def _add(works: dict[Any, Work], key: Hashable, work: Work) -> None:
    works[key] = works[key] + work if key in works else work


def modules_of(root: Module) -> Iterator[Module]:
    """The modules of a tree, each before those inside it."""
    yield root
    for child in root.children:
        yield from modules_of(child)


def path_of(source: Source) -> tuple[str, ...]:
    """The path of the module in the tree to which a source belongs."""
    if source.module == _ROOT:
        return (MODEL,)
    if source.module == _LOSS or source.module.startswith(f"{_LOSS}."):
        return (LOSS, *source.module.split(".")[1:])
    if source.module:
        return (MODEL, *source.module.split("."))
    return (source.phase,) if source.phase in _APART else (OUTSIDE if source.phase else UNKNOWN,)


def _frozen(branch: _Branch, name: str, path: tuple[str, ...], texts: Mapping[str, str], *, timed: bool) -> Module:
    children = tuple(_frozen(b, n, (*path, n), texts, timed=timed) for n, b in branch.children.items())
    lines = tuple(
        _line(place, branch, texts, timed=timed) for place in dict.fromkeys((*branch.operators, *branch.kernels))
    )
    captured = [row.work for line in lines for row in line.operators]
    compiled = [row.work for line in lines for row in line.kernels]
    phases: dict[str, Work] = {}
    for work in (*(r.of_phase for line in lines for r in line.operators), *(w for c in children for w in c.phases)):
        _add(phases, work.name, work)
    seconds = sum(branch.seconds.values()) + sum(c.seconds or 0.0 for c in children)
    return Module(
        name,
        ".".join(path),
        sum((*captured, *(c.captured for c in children)), Work(name, 0, 0, 0, 0)),
        sum((*compiled, *(c.compiled for c in children)), Work(name, 0, 0, 0, 0)),
        tuple(phases.values()),
        seconds if timed else None,
        lines,
        children,
    )


def _line(place: str, branch: _Branch, texts: Mapping[str, str], *, timed: bool) -> Line:
    return Line(
        place,
        texts.get(place, ""),
        tuple(
            OperatorRow(phase, dtype, shape, work)
            for (phase, _, dtype, shape), work in branch.operators.get(place, {}).items()
        ),
        tuple(
            KernelRow(phase, work, branch.seconds.get((place, name, phase)) if timed else None)
            for (name, phase), work in branch.kernels.get(place, {}).items()
        ),
    )
