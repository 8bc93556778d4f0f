"""A part of `scripts/op_coverage`: operators of every namespace, compiled in groups, and clean refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "opcoverage"))
from report import page, passed, reason, stages, worst
from worker import attempt, cases, operators

pytestmark = pytest.mark.filterwarnings("ignore")

GROUPS = {
    "torch": ("addmm", "atan2", "cumsum", "gather", "logsumexp", "where"),
    "indexing": ("index_select", "masked_fill", "scatter_add", "topk", "tril"),
    "nn.functional": ("gelu", "layer_norm", "linear", "mse_loss", "softplus", "conv2d", "avg_pool2d"),
    "linalg and fft": ("linalg.vector_norm", "linalg.solve_triangular", "fft.rfft", "fft.ifft"),
    "special and masked": ("special.entr", "special.xlog1py", "masked.sum", "masked.softmax"),
}
REFUSED = ("masked_select", "to_sparse")


def name_of(short: str, group: str) -> str:
    return f"nn.functional.{short}" if group == "nn.functional" else short


@pytest.mark.parametrize("group", GROUPS)
def test_operators_compile_and_agree_with_eager(group):
    known = operators()
    samples = [case for short in GROUPS[group] for case in cases(known[name_of(short, group)], 2)]
    assert attempt(samples) == ("pass", "")


@pytest.mark.parametrize("name", REFUSED)
def test_operators_are_refused_cleanly(name):
    verdict, said = attempt(cases(operators()[name], 1))
    assert verdict == "refused"
    assert "aten." in said


def test_the_page_counts_operators_and_gives_reasons():
    said = "/a/b.py:3: y = f(x): aten._foo.default has no lowering: it is none. Use bar\nmore"
    records = {
        "sin": {"verdict": "pass", "verdicts": ["pass"], "details": [""]},
        "fft.foo": {"verdict": worst(["pass", "refused"]), "verdicts": ["pass", "refused"], "details": ["", said]},
        "linalg.bar": {"verdict": worst(["refused", "wrong"]), "verdicts": ["wrong"], "details": ["no lowering"]},
    }
    assert passed(records) == {"torch": (1, 1), "linalg": (0, 1), "fft": (0, 1), "all": (1, 3)}
    assert stages(records) == {"wrong": 1, "refused": 1}
    assert reason(records["fft.foo"]) == "aten._foo.default has no lowering: it is none"
    text = page(records, 8)
    assert "| all | 1 | 3 | 33.3 |" in text
    assert "* `fft.foo`: aten._foo.default has no lowering" in text
