"""Summaries of the measurements: by namespace, by stage, and as the page docs/operators.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

Records = Mapping[str, Mapping[str, Any]]

NAMESPACES = ("torch", "nn.functional", "linalg", "fft", "special", "masked")
PACKAGES = ("torch", "torch-mlir", "iree-base-compiler")

# Every outcome except a pass, the worst first. An operator's verdict is the worst verdict of its samples.
STAGES = {
    "wrong": "compiles, and disagrees with the float64 oracle",
    "crash": "ends the process",
    "hang": "takes longer than the time limit",
    "error": "raises an exception that is not IronGrad's",
    "internal": "fails one of IronGrad's own checks",
    "compile": "IREE cannot compile it",
    "import": "torch-mlir cannot lower it",
    "capture": "cannot be captured",
    "refused": "refused by name (UnsupportedOpError), before a compiler starts",
}

_PREAMBLE = """# Operators

This page lists which of PyTorch's differentiable operators IronGrad compiles correctly. The operators are all float32
operators with a gradient in PyTorch's own test database (OpInfo). `irongrad.compile_function` compiles each operator on
its first {samples} sample inputs, together with the gradients of a random weighted sum of its outputs. The results are
compared with eager float64. An operator passes if all its samples pass.

`./scripts/op_coverage` makes these measurements and writes this page. [functions.md](functions.md) explains how to give
an operator of your own a decomposition. `irongrad check` lists what the operators of one training step become.

Measured with {versions}.
"""


def namespace(name: str) -> str:
    """Return the namespace of an operator; `torch` if its name has no prefix."""
    return next((n for n in NAMESPACES if name.startswith(f"{n}.")), "torch")


def worst(verdicts: list[str]) -> str:
    """Return an operator's verdict: the worst of its samples' `verdicts`, or `pass` if all samples passed."""
    return next((stage for stage in STAGES if stage in verdicts), "pass")


def passed(records: Records) -> dict[str, tuple[int, int]]:
    """Return the number of operators that passed and the number of operators, by namespace and for `all`."""
    found = {n: [r for k, r in records.items() if namespace(k) == n] for n in NAMESPACES}
    found["all"] = list(records.values())
    return {n: (sum(r["verdict"] == "pass" for r in rs), len(rs)) for n, rs in found.items() if rs}


def stages(records: Records) -> dict[str, int]:
    """Return the number of operators that failed at each stage, without stages at which none failed."""
    counts = Counter(r["verdict"] for r in records.values())
    return {stage: counts[stage] for stage in STAGES if counts[stage]}


def page(records: Records, samples: int) -> str:
    """Return the text of docs/operators.md; `samples` is the number of sample inputs of each operator."""
    versions = ", ".join(f"{p} {version(p)}" for p in PACKAGES)
    lines = [
        _PREAMBLE.format(samples=samples, versions=versions),
        "| namespace | pass | of | % |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {n} | {good} | {of} | {100 * good / of:.1f} |" for n, (good, of) in passed(records).items()]
    if failing := stages(records):
        lines += ["", "| outcome | operators | |", "| --- | ---: | --- |"]
        lines += [f"| {stage} | {count} | {STAGES[stage]} |" for stage, count in failing.items()]
    for stage in failing:
        lines += ["", f"## {stage.capitalize()}", ""]
        lines += [f"* `{n}`: {reason(r)}" for n, r in sorted(records.items()) if r["verdict"] == stage]
    return "\n".join(lines) + "\n"


_NAMED = re.compile(
    r"(?:[a-z_]+\.)?\w+\.\w+(?:\.\w+)?,? (?:a part of|has no|draws|gives|is a|cannot|on \w+ tensors)[^\n]*"
)
_PLACE = re.compile(r"^(?:\S+\.py:\d+(?:: )?|\(line unknown\))[^\n]*\n\s*")

_INLINE = re.compile(r"^\S+\.py:\d+: ")


def reason(record: Mapping[str, Any]) -> str:
    """Return why an operator did not pass, in one line, without positions in files."""
    said = [d for v, d in zip(record["verdicts"], record["details"], strict=True) if v == record["verdict"]]
    text = said[0].strip() if said else ""
    named = _NAMED.search(text)
    line = named[0] if named else (_PLACE.sub("", text).splitlines() or [""])[0]
    return _INLINE.sub("", line).split(". ")[0].replace("|", "\\|")[:240]
