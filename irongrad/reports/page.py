"""The report as one page of HTML, with everything in it that it needs."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from irongrad.analysis.other_work import said
from irongrad.reports.amounts import amount, nbytes
from irongrad.reports.figures import COLOURS, figures, templates
from irongrad.reports.placed import targets_of
from irongrad.reports.report import Report
from irongrad.runtime.refusals import interval_of
from irongrad.runtime.tensor_sizes import size_of

_TEMPLATES = "templates"


def page(report: Report) -> bytes:
    """The report as HTML in UTF-8. Every name and line is escaped, and nothing is loaded from elsewhere."""
    environment = Environment(
        loader=PackageLoader("irongrad.reports", _TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": amount,
        "busy": said,
        "bytes": nbytes,
        "milliseconds": lambda seconds: f"{1e3 * seconds:,.3f}",
        "share": _share,
        "shape": _shape,
        "short": _short,
        "sizes": _sizes,
    }
    own = targets_of(report.manifest, report.target)
    script, plotly = _own("page.js"), get_plotlyjs()
    text = environment.get_template("report.html.jinja").render(
        r=report,
        own=own,
        code=sum(report.manifest.files[target.file].size for target in own),
        style=Markup(_own("page.css")),
        script=Markup(script),
        plotly=base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode(),
        scripts=" ".join(map(_allowed, (script, plotly))),
        charts={"figures": figures(report), "templates": templates()},
        colours=COLOURS,
        size_of=size_of,
        interval_of=interval_of,
    )
    return text.encode("utf-8", "replace")


def _own(name: str) -> str:
    return (files("irongrad.reports") / _TEMPLATES / name).read_text()


def _allowed(script: str) -> str:
    """A script in the terms of a Content Security Policy, by its hash: a browser runs no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _share(part: int | float | None, whole: int | float | None) -> float:
    return part / whole if part and whole else 0.0


def _shape(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _short(operator: str) -> str:
    """The name of an operator without its namespace and overload: `mul` of `aten.mul.Tensor`."""
    parts = operator.split(".")
    return parts[1] if len(parts) == 3 else operator
