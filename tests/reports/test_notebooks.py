"""What notebooks show of steps, artifacts and reports: small tables, in which no name becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import nn

import irongrad as ig
from irongrad.analysis.file import read_analysis
from irongrad.pipeline.package import Artifact
from irongrad.reports.summary import summary_of
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.notebook_table import notebook_table
from irongrad.runtime.report import Comparison, Report

HOSTILE = "</table><script>alert(1)</script>\"'>&amp;"


class Tags(HTMLParser):
    """The tags and the text of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def shown(thing: object) -> str:
    """The text that a notebook shows; it has no tags but those of a table."""
    found = Tags(thing._repr_html_())  # type: ignore[attr-defined]
    assert found.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    return found.text


def test_a_step() -> None:
    model = type(HOSTILE, (nn.Linear,), {})(4, 3)
    inputs = {"x": torch.randn(8, 4), "y": torch.randint(0, 3, (8,))}
    step = ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    text = shown(step)
    for expected in (f"{HOSTILE}, 15 parameters", "cross_entropy", "SGD", "x: float32[8, 4], y: int64[8]", "f32"):
        assert expected in text


def test_an_artifact_and_its_summary(mlp_artifact: Path) -> None:
    manifest = read_manifest(mlp_artifact)
    text = shown(Artifact(mlp_artifact, manifest, {}))
    assert str(mlp_artifact) in text
    assert "train_step" in text
    assert "of what is allowed, against eager float64" in text
    summary = summary_of(read_analysis(mlp_artifact, manifest), "llvm-cpu", "train_step")
    text = shown(summary)
    assert "One call of train_step on llvm-cpu" in text
    assert f"{summary.compiled.count:,}" in text


def test_a_verification_shows_the_worst_values_first() -> None:
    rows = [Comparison("train_step", f"{HOSTILE}{n}", error=float(n), allowed=100.0) for n in range(30)]
    text = shown(Report(tuple(rows), 2, "float64"))
    assert "against eager float64: passed" in text
    assert text.index(f"{HOSTILE}29") < text.index(f"{HOSTILE}28")
    assert "and 10 more" in text


def test_a_table_without_rows() -> None:
    assert notebook_table("empty", []) == "<table><caption>empty</caption><tbody></tbody></table>"
