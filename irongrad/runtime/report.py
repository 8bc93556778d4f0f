"""The report of a verification: every compared value, how tight the comparison is, and what it cannot judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from irongrad.runtime.notebook_table import notebook_table

# Shares of the largest value of a kind. A tolerance below the first does not matter. A value below the second is zero
# but for the rounding of float64, and a tolerance below the third says that it is zero.
_NEGLIGIBLE = 1e-5
_ZERO = 1e-10
_IS_ZERO = 1e-2
_TINY = 1e-30

WHY_UNJUDGED = (
    "eager's own runs differ there by as much as the value itself, as after a cast to integers, a comparison at its "
    "edge, or a variance of two values"
)


@dataclass(frozen=True)
class Comparison:
    """One compared value.

    Attributes:
        entry_point: the entry point that computed it.
        key: the key of the value (`irongrad.runtime.golden.key_of`).
        error: the largest absolute difference from the oracle.
        allowed: the largest acceptable difference.
        elements: the number of compared elements.
        magnitude: the largest absolute value of the oracle; infinite if there is none to compare with.
    """

    entry_point: str
    key: str
    error: float
    allowed: float
    elements: int = 1
    magnitude: float = float("inf")

    @property
    def ratio(self) -> float:
        """The error as a fraction of its tolerance; infinite for NaN against a number.

        The tolerance is infinite for gradients that overflow in eager runs: their update is skipped.
        """
        if self.error == 0.0 or self.allowed == float("inf"):
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else float("inf")


@dataclass(frozen=True)
class Report:
    """All comparisons of a verification.

    Attributes:
        comparisons: the compared values.
        steps: the number of training steps.
        oracle: the dtype of the eager reference run.
        chosen: the values of inputs and hyperparameters at which one more step was compared, each in a few words.
        skipped: the values that eager does not survive, each with the reason.
    """

    comparisons: tuple[Comparison, ...]
    steps: int
    oracle: str
    chosen: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest ratio."""
        return max(self.comparisons, key=lambda c: c.ratio)

    @property
    def passed(self) -> bool:
        """Whether every error is within its tolerance; steps that do not all train have nothing to compare in turn."""
        return all(c.ratio <= 1.0 for c in self.comparisons)

    @property
    def wrong(self) -> tuple[Comparison, ...]:
        """The comparisons whose error exceeds the tolerance, the worst first."""
        return tuple(sorted((c for c in self.comparisons if c.ratio > 1), key=lambda c: -c.ratio))

    @property
    def unjudged(self) -> tuple[Comparison, ...]:
        """The comparisons that cannot tell right from wrong: the tolerance is as large as the value.

        The tolerance of a value that is zero but for rounding is as large, too; that value is judged to be zero.
        """
        sizes = self._sizes()
        return tuple(c for c, size in zip(self.comparisons, sizes, strict=True) if c.allowed >= max(size, _TINY))

    @property
    def unjudged_values(self) -> tuple[str, ...]:
        """The keys of the values that cannot be judged, each once."""
        return tuple(dict.fromkeys(c.key for c in self.unjudged))

    @property
    def tightness(self) -> Tightness:
        """How tight the comparisons are; those without a bound do not count."""
        bounded = [(c, s) for c, s in zip(self.comparisons, self._sizes(), strict=True) if 0 < c.allowed < float("inf")]
        errors = _middle_and_largest([c.ratio for c, _ in bounded])
        tolerances = _middle_and_largest([c.allowed / size for c, size in bounded if 0 < size < float("inf")])
        return Tightness(sum(c.elements for c in self.comparisons), *errors, *tolerances)

    def _repr_html_(self) -> str:
        """The report as a notebook shows it: the values with the largest errors first."""
        verdict = "passed" if self.passed else f"failed in {len(self.wrong)} values"
        worst = sorted(self.comparisons, key=lambda c: c.ratio, reverse=True)
        rows = [(c.entry_point, c.key, f"{c.error:.3g}", f"{c.allowed:.3g}", f"{c.ratio:.0%}") for c in worst]
        title = f"Verification of {self.steps} steps against eager {self.oracle}: {verdict}"
        return notebook_table(title, rows, ("entry point", "value", "error", "allowed", ""))

    def _sizes(self) -> list[float]:
        """What the tolerance of each comparison is measured by: the value, or more for one that is zero."""
        scales: dict[str, float] = {}
        for c in self.comparisons:
            if c.magnitude != float("inf"):
                scales[_kind(c.key)] = max(scales.get(_kind(c.key), 0.0), c.magnitude)
        return [_size(c.magnitude, scales.get(_kind(c.key), 0.0)) for c in self.comparisons]


@dataclass(frozen=True)
class Tightness:
    """How tight a verification is.

    Attributes:
        elements: the number of compared elements.
        error_median: the median over the compared values of the error, as a share of its tolerance.
        error_largest: the largest such share.
        tolerance_median: the median over the compared values of the tolerance, as a share of the largest element. A
            value that is zero but for rounding counts as large as that is.
        tolerance_largest: the largest such share.
    """

    elements: int
    error_median: float
    error_largest: float
    tolerance_median: float
    tolerance_largest: float


def _size(magnitude: float, scale: float) -> float:
    return max(magnitude, (_IS_ZERO if magnitude <= _ZERO * scale else _NEGLIGIBLE) * scale)


def _middle_and_largest(shares: Sequence[float]) -> tuple[float, float]:
    return (median(shares), max(shares)) if shares else (0.0, 0.0)


def _kind(key: str) -> str:
    """Values whose sizes can be compared: those of one step and one kind, such as an optimizer's first moments."""
    kind, step, name = key.split("/", 2)
    first, _, rest = name.partition("/")
    return f"{kind}/{step}/{first}/{rest.partition('/')[0]}" if rest and kind == "state" else f"{kind}/{step}"


def combined(reports: Mapping[str, Report]) -> Report:
    """One report of several steps; the names of their entry points get the name of the step.

    Args:
        reports: the report of each step by name; that of all together, or of the only step, has an empty name.
    """
    if list(reports) == [""]:
        return reports[""]
    comparisons = tuple(
        replace(c, entry_point=f"{name}.{c.entry_point}" if name else c.entry_point)
        for name, report in reports.items()
        for c in report.comparisons
    )
    first = next(iter(reports.values()))
    return replace(
        first,
        comparisons=comparisons,
        chosen=tuple(f"{name}: {text}" for name, report in reports.items() for text in report.chosen),
        skipped=tuple(f"{name}: {text}" for name, report in reports.items() for text in report.skipped),
    )
