"""Compare a target of an artifact with all expected values, and refuse a program that disagrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from irongrad.pipeline.oracle.expected_values import ExpectedAtSizes, verify_against
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import Golden, is_later
from irongrad.runtime.manifest import SKIPPED
from irongrad.runtime.report import WHY_UNJUDGED, Comparison, Report, combined
from irongrad.runtime.session import Session
from irongrad.runtime.verification import restart


def verified(session: Session, expected: Mapping[str, ExpectedAtSizes]) -> Report:
    """Compare a target with all expected values; return the report of those that the artifact keeps.

    Raises:
        VerificationError: the target's numbers are wrong, or cannot be judged.
    """
    reports: dict[str, Report] = {}
    for name, values in expected.items():
        view = session.step(name) if name in session.manifest.steps else session
        reports[name if view is not session else ""] = _verified_step(_restarted(view) if reports else view, values)
    return combined(reports)


def _verified_step(session: Session, expected: ExpectedAtSizes) -> Report:
    reports: list[Report] = []
    chosen: list[str] = []
    left_out = list(expected.skipped)
    for values in (expected.own, *expected.others):
        session = _restarted(session) if reports else session
        reports.append(verify_against(session, values))
        if unjudged := _unjudged_choice(reports[-1], values.golden):
            left_out.append(unjudged)
            continue
        check_report(reports[-1], values.golden)
        chosen += [values.golden.about] if values.golden.about else []
    return replace(reports[0], chosen=tuple(chosen), skipped=tuple(left_out))


def _unjudged_choice(report: Report, golden: Golden) -> str:
    """Why values that a choice computes cannot be judged, if nothing else is wrong; empty otherwise.

    The example's own values are judged. At a chosen step, another gradient may be zero but for rounding.
    """
    wrong = report.wrong
    if not golden.about or not wrong or not set(wrong) <= set(report.unjudged):
        return ""
    if golden.later and not all(is_later(c.key) for c in wrong):
        return ""
    return f"{golden.about}: {', '.join(dict.fromkeys(c.key for c in wrong))} cannot be judged"


def _restarted(session: Session) -> Session:
    """A session at the initial state, without accumulated gradients."""
    names = {e.name for e in session.manifest.entry_points}
    if "grad_step" in names and "apply_step" not in names:  # nothing else clears the gradients
        target = session.target.name if session.manifest.placement is None else None
        fresh = Session(session.directory, target=target, on_nonfinite="ignore")
        return fresh.step(session.step_name) if session.step_name else fresh
    restart(session)
    return session


def check_report(report: Report, golden: Golden) -> None:
    """Refuse a program that disagrees with the expected values.

    Raises:
        VerificationError: the error of a value exceeds its tolerance.
    """
    if report.passed:
        return
    bad = report.wrong
    rows = "\n".join(f"  {c.entry_point:<12} {c.key}: error {c.error:.3g}, allowed {c.allowed:.3g}" for c in bad[:8])
    chosen = f" at {golden.about}{' in the second step' if golden.later else ''}" if golden.about else ""
    skips = _OTHER_SKIPS if _skips_differ(bad) else ""
    if set(bad) <= set(report.unjudged):
        names = ", ".join(dict.fromkeys(c.key for c in bad))
        raise VerificationError(
            f"the compiled step cannot be judged{chosen}, so no artifact was written: {names}. "
            f"{WHY_UNJUDGED.capitalize()}:\n{rows}\n"
            "Give example inputs at which the step is better conditioned, such as more rows in a batch, or values away "
            "from the edge"
        )
    raise VerificationError(
        f"the compiled step disagrees with eager {golden.oracle}{chosen} in {len(bad)} of {len(report.comparisons)} "
        f"values, so no artifact was written:\n{rows}\n{skips}"
        "This is a bug in IronGrad or its toolchain. Please report it with the model; --dump-dir DIR keeps every "
        "stage"
    )


# A gradient of examples/resnet18.py is 65530 at the default scale; float16 rounds 65520 and more to infinity.
_OTHER_SKIPS = (
    "Eager and the compiled step skip different updates. If a scaled gradient is near float16's largest number, 65504, "
    "its last bits decide whether it overflows: compile with another scale, such as loss_scale="
    'torch.amp.GradScaler("cpu", init_scale=2.0**14). If that disagrees too: '
)


def _skips_differ(bad: Sequence[Comparison]) -> bool:
    return any(c.key.endswith(f"/{SKIPPED}") for c in bad)
