"""What one step of an entry point computes and moves: as it was captured, and as a target executes it."""

from __future__ import annotations

from dataclasses import dataclass

from irongrad.analysis.records import Analysis, Source, TargetRecord
from irongrad.analysis.totals import (
    Work,
    executed,
    kernel_name,
    launch_work,
    operator_work,
    source_of_launch,
    total,
    with_parents,
)
from irongrad.reports.amounts import amount, nbytes
from irongrad.runtime.errors import UserError
from irongrad.runtime.notebook_table import notebook_table

ELSEWHERE = "(outside of the model)"


@dataclass(frozen=True)
class Summary:
    """The work of one step of an entry point.

    Attributes:
        entry: the entry point.
        target: the target.
        captured: all operators as captured. Each reads its operands from memory and writes its results, as in eager.
        compiled: all launches of kernels, and copies.
        phases: the captured operators by phase.
        operators: the captured operators by operator.
        modules: the captured operators by module; each module has the sum over the modules inside it.
        lines: the captured operators by the user's line.
        kernels: the launches by kernel.
        kernel_modules: the launches by the module of the operator that gave the kernel its form.
    """

    entry: str
    target: str
    captured: Work
    compiled: Work
    phases: tuple[Work, ...]
    operators: tuple[Work, ...]
    modules: tuple[Work, ...]
    lines: tuple[Work, ...]
    kernels: tuple[Work, ...]
    kernel_modules: tuple[Work, ...]

    def _repr_html_(self) -> str:
        """The summary as a notebook shows it: the work as captured and as compiled, and by module."""
        rows = [self.captured, self.compiled, *self.modules]
        cells = [(w.name, f"{w.count:,}", amount(w.flops), nbytes(w.nbytes)) for w in rows]
        title = f"One call of {self.entry} on {self.target}"
        return notebook_table(title, cells, ("", "count", "operations", "read and written"))


def summary_of(analysis: Analysis, target: str, entry: str) -> Summary:
    """Sum up one call of `entry` on `target`.

    Raises:
        UserError: nothing is recorded for the target, or the entry point launches no kernels.
    """
    record = _record(analysis, target)
    if not executed(record, entry):
        known = ", ".join(entries_of(analysis, target))
        raise UserError(f"the entry point {entry!r} launches no kernels; those that do are {known}")
    phases = operator_work(analysis, entry, lambda source: source.phase)
    kernels = launch_work(record, entry, lambda launch: kernel_name(record, launch))
    return Summary(
        entry,
        target,
        total(phases, "captured"),
        total(kernels, "compiled"),
        tuple(phases),
        tuple(operator_work(analysis, entry, lambda source: source.operator)),
        tuple(with_parents(operator_work(analysis, entry, _module))),
        tuple(operator_work(analysis, entry, lambda source: source.line)),
        tuple(kernels),
        tuple(with_parents(launch_work(record, entry, lambda x: _module(source_of_launch(record, x))))),
    )


def entries_of(analysis: Analysis, target: str) -> list[str]:
    """The entry points that launch kernels: those with recorded operators first."""
    record = _record(analysis, target)
    called = {name for names in record.calls.values() for name in names}
    launching = dict.fromkeys((*record.calls, *(launch.function for launch in record.launches)))
    rest = (name for name in launching if name not in called and name not in analysis.chains)
    found = [*(name for name in analysis.chains if name in launching), *rest]
    return [name for name in found if any(e.launch.kernel is not None for e in executed(record, name))]


def _record(analysis: Analysis, target: str) -> TargetRecord:
    if target not in analysis.targets:
        raise UserError(f"nothing is recorded for the target {target!r}; there are {', '.join(analysis.targets)}")
    return analysis.targets[target]


def _module(source: Source | None) -> str:
    return (source.module if source is not None else "") or ELSEWHERE
