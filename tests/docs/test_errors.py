"""docs/errors.md has a section for each class of error, and every error names its own."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from irongrad.runtime import errors
from irongrad.runtime.errors import ArtifactError, IronGradError
from tests.docs.test_references import SOURCES, anchors_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
PUBLIC = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, IronGradError)]


def nodes_of(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text()))


def classes() -> Iterator[tuple[str, str]]:
    """The module and the name of every class in the package that extends an error of IronGrad."""
    known, before = {"IronGradError"}, 0
    defined = [
        (file, n) for file in SOURCES for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)
    ]
    while len(known) > before:
        before = len(known)
        known |= {n.name for _, n in defined if known & {ast.unparse(base) for base in n.bases}}
    for file, node in defined:
        if node.name in known:
            yield ".".join(file.relative_to(ROOT).with_suffix("").parts), node.name


@pytest.mark.parametrize(("module", "name"), sorted(classes()), ids=lambda text: text.rpartition(".")[2])
def test_every_error_names_a_section_of_the_page(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    error = kind.__new__(kind)
    IronGradError.__init__(error, "what is wrong")
    page, _, anchor = error.section.partition("#")
    assert (page, anchor in anchors_of(PAGE.read_text())) == ("docs/errors.md", True)
    assert error.__notes__ == [f"see {error.section}"]
    if kind in PUBLIC:
        assert anchor == name.lower()


def test_the_note_is_said_once_by_a_traceback_and_not_by_the_text() -> None:
    for error in (e := ArtifactError("it is damaged"), copy.copy(e), pickle.loads(pickle.dumps(e))):
        assert str(error) == "it is damaged"
        assert "".join(traceback.format_exception_only(error)).splitlines()[1:] == ["see docs/errors.md#artifacterror"]


def test_the_table_has_every_class_with_its_exit_code() -> None:
    told = re.findall(r"^\| \[(\w+)\]\(#\w+\) \| .* \| (\d) \|$", PAGE.read_text(), re.MULTILINE)
    assert {(c.__name__, str(c.exit_code)) for c in PUBLIC if c is not IronGradError} == set(told)


def test_the_words_of_each_message_are_in_the_package() -> None:
    texts = [_text(n) for file in SOURCES for n in nodes_of(file) if isinstance(n, ast.expr)]
    told = re.findall(r"^\| `(.*?)` \| [^|]*\|$", PAGE.read_text(), re.MULTILINE)
    assert len(told) > 40
    assert [words for words in told if not any(words in text for text in texts)] == []


def _text(node: ast.expr) -> str:
    """The text of a literal, with an ellipsis for each value in an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_the_command_line_names_the_section(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "irongrad", "inspect", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "see docs/errors.md#artifacterror"
