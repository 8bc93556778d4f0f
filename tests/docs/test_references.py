"""Paths, links, commands, options and modules that the documentation and the package's comments name exist."""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from irongrad.cli.main import cli
from irongrad.pipeline.iree.phases import PHASES
from irongrad.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "irongrad"
DEV = ROOT / "docs" / "dev"
FOLDERS = ("irongrad", "tests", "docs", "examples", "scripts", "benchmarks")
ROOMS = tuple(sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()))

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Attributes in IREE's module, a key in a graph's `meta`, and a C header: they look like modules of the package.
NO_MODULES = {
    "irongrad.h",
    "irongrad.gradient",
    "irongrad.held",
    "irongrad.operations",
    "irongrad.over_ranks",
    "irongrad.zeroed",
}
# Names of state tensors that look like paths.
NO_PATHS = {"irongrad/draws", "irongrad/seed", "irongrad/steps"}

_PATH = re.compile(rf"(?<![\w./~<-])(?:{'|'.join(sorted({*FOLDERS, *ROOMS}))})/[\w./-]*")
_FILE = re.compile(r"(?<![\w./-])(?:test_\w+\.py|[A-Z]{3,}\.md)\b")
_MODULE = re.compile(r"(?<![\w./-])irongrad(?:\.[A-Za-z_]\w*)+")
_COMMAND = re.compile(r"(?<![\w./'=-])irongrad ([a-z][\w-]*)([^`\n]*)")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

# Words after which `irongrad` is the package and not the command.
_PACKAGE_BEFORE = re.compile(r"(?:install|import[\w ,.]*|package)\s+$")
# What ends a command on its line.
_COMMAND_END = re.compile(r"  #|\s[|>;&]|[;)]\s|[;)]$|\. [A-Z]")


@dataclass(frozen=True)
class Text:
    """A text that names things.

    Attributes:
        file: the file with the text.
        line: the first line of the text in the file.
        text: the text.
    """

    file: Path
    line: int
    text: str

    def at(self, offset: int) -> str:
        """The file and line of the character at `offset`, for a message."""
        return f"{self.file.relative_to(ROOT)}:{self.line + self.text.count(chr(10), 0, offset)}"


def texts_of(file: Path) -> Iterator[Text]:
    """Yield the whole text of a page, or the comments and strings of a Python file."""
    if file.suffix != ".py":
        yield Text(file, 1, file.read_text())
        return
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        line = token.start[0]
        if token.type == tokenize.STRING:
            yield Text(file, line, _value_of(token.string))
        elif token.type == tokenize.COMMENT:
            comments.append((line, token.string.removeprefix("#")))
    for number, (line, text) in enumerate(comments):
        if number and comments[number - 1][0] == line - 1:
            continue
        block = [text]
        while number + len(block) < len(comments) and comments[number + len(block)][0] == line + len(block):
            block.append(comments[number + len(block)][1])
        yield Text(file, line, "\n".join(block))


def _value_of(literal: str) -> str:
    """The text of a string literal; of an f-string, its source."""
    if "f" in literal.partition(literal[-1])[0].lower():
        return literal.strip("\"'rRfF")
    value = ast.literal_eval(literal)
    return value if isinstance(value, str) else ""


def problems_of(text: Text) -> Iterator[str]:
    """Yield a message for each name in `text` that does not exist."""
    for check in (_paths, _files, _modules, _commands):
        for offset, problem in check(text.text):
            yield f"{text.at(offset)}: {problem}"
    if text.file.suffix == ".md":
        for offset, problem in _links(text.text, text.file):
            yield f"{text.at(offset)}: {problem}"


def _paths(text: str) -> Iterator[tuple[int, str]]:
    for found in _PATH.finditer(text):
        name = found[0].rstrip(".-")
        followed = text[found.end() : found.end() + 1]
        if followed in ("<", "*", "{", "…", "$", "("):
            name = name.rpartition("/")[0]  # a pattern: its folder has to be there
        if not any((base / name).exists() for base in _bases(name)) and not _is_prose(name):
            yield found.start(), f"there is no {name}"


def _bases(name: str) -> tuple[Path, ...]:
    first = name.partition("/")[0]
    return (ROOT,) * (first in FOLDERS) + (PACKAGE,) * (first in ROOMS)


def _is_prose(name: str) -> bool:
    """Whether `name` is words with a slash between them, a state tensor, or a path in IREE's sources."""
    if name.partition("/")[0] in FOLDERS:
        return name in NO_PATHS
    return name.startswith("runtime/src/") or not re.search(r"[._]|/.*/|/$", name)


def _files(text: str) -> Iterator[tuple[int, str]]:
    """Check files named without their folder: tests, and pages at the top of the repository."""
    for found in _FILE.finditer(text):
        if found[0] not in _known_files():
            yield found.start(), f"there is no file {found[0]}"


@cache
def _known_files() -> frozenset[str]:
    return frozenset(p.name for p in [*(ROOT / "tests").rglob("test_*.py"), *ROOT.glob("*.md"), *PACKAGE.rglob("*.md")])


def _modules(text: str) -> Iterator[tuple[int, str]]:
    for found in _MODULE.finditer(text):
        name = found[0]
        if name not in NO_MODULES and not resolves(name):
            yield found.start(), f"there is no {name}"


@cache
def resolves(name: str) -> bool:
    """Whether `name` is a module of the package or an attribute of one."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[size:]:
            try:
                known = hasattr(value, attribute) or attribute in getattr(value, "__annotations__", {})
            except UserError:  # it needs Flower, which cannot be installed beside the compiler
                return attribute in getattr(value, "__all__", ())
            if not known:
                return False
            value = getattr(value, attribute, None)
        return True
    return False


def _commands(text: str) -> Iterator[tuple[int, str]]:
    joined = re.sub(r"\\\n", "  ", text)  # of the same length, so offsets stay right
    for found in _COMMAND.finditer(joined):
        if _PACKAGE_BEFORE.search(joined[: found.start()]):
            continue
        verb = verbs().get(found[1])
        if verb is None:
            yield found.start(), f"there is no command irongrad {found[1]}"
            continue
        rest = _COMMAND_END.split(found[2])[0]
        for option in _OPTION.findall(rest):
            if option not in options_of(verb):
                yield found.start(), f"irongrad {found[1]} has no option {option}"


@cache
def verbs() -> dict[str, click.Command]:
    """The commands of the command line, by name."""
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def options_of(command: click.Command) -> set[str]:
    """Every spelling of every option of a command."""
    spelled = (name for p in command.params for name in (*p.opts, *p.secondary_opts))
    return {"--help", "-h", *(name for name in spelled if name.startswith("-"))}


def _links(text: str, page: Path) -> Iterator[tuple[int, str]]:
    hidden = _FENCE.sub(lambda m: re.sub(r"\S", " ", m[0]), text)
    for found in _LINK.finditer(hidden):
        if re.match(r"https?:", found[1]):
            continue
        path, _, anchor = found[1].partition("#")
        file = (page.parent / path) if path else page
        if not file.exists():
            yield found.start(), f"the link to {path} leads nowhere"
        elif anchor and anchor not in anchors_of(file.read_text()):
            yield found.start(), f"{path or page.name} has no heading #{anchor}"


def anchors_of(markdown: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("file", [*PAGES, *SOURCES], ids=lambda f: str(f.relative_to(ROOT)))
def test_every_name_exists(file: Path) -> None:
    problems = [problem for text in texts_of(file) for problem in problems_of(text)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("see irongrad/pipeline/gone.py", "there is no irongrad/pipeline/gone.py"),
        ("see `pipeline/iree/gone.py`.", "there is no pipeline/iree/gone.py"),
        ("tests/passes/gone/<pass>/*.mlir", "there is no tests/passes/gone"),
        ("tests/docs/test_memory.py and test_gone.py", "there is no file test_gone.py"),
        ("as GONE.md says", "there is no file GONE.md"),
        ("`irongrad.passes.gone`", "there is no irongrad.passes.gone"),
        ("irongrad.pipeline.driver.gone", "there is no irongrad.pipeline.driver.gone"),
        ("run `irongrad frobnicate step.py`", "there is no command irongrad frobnicate"),
        ("    irongrad compile a.py:f -o b --gone", "irongrad compile has no option --gone"),
        ("    irongrad passes \\\n        --gone", "irongrad passes has no option --gone"),
        ("[here](gone.md)", "the link to gone.md leads nowhere"),
        ("[here](README.md#gone)", "README.md has no heading #gone"),
    ],
)
def test_a_name_that_is_gone_is_noticed(text: str, problem: str) -> None:
    page = Text(ROOT / "page.md", 1, f"# A page\n\n{text}\n")
    assert [p.partition(": ")[2] for p in problems_of(page)] == [problem]


def test_names_that_exist_are_not_reported() -> None:
    text = """
irongrad/pipeline/driver.py, `pipeline/iree/phases.py`, tests/passes/module/<pass>/*.mlir, examples/digits.py:make_step
`irongrad.held`, irongrad.runtime.load, irongrad.pipeline.driver.compile and/or graph/step
pip install irongrad             # to run
    irongrad compile step.py:make_step -o build/net --dump-dir DIR   # writes --files
    irongrad opt step.mlir --pass share-kernels | iree-opt --verify
[a page](README.md#a-page) [another](docs/memory.md)
"""
    page = Text(ROOT / "README.md", 1, text)
    assert [p for p in problems_of(page) if "a-page" not in p] == []


def test_comments_and_strings_of_python_are_read(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text('"""A docstring."""\n# one\n# two\nx = 1  # three\n\n# four\ny = "five"\n')
    found = [(text.line, text.text) for text in texts_of(file)]
    assert found == [(1, "A docstring."), (7, "five"), (2, " one\n two\n three"), (6, " four")]


def test_every_page_has_its_place_in_the_site() -> None:
    """As the build of the site checks it, but at once."""
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    placed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert there - placed == set()


def files_of_the_package() -> set[str]:
    """Every file of the package that git knows or would add. Headings of folders stand for `__init__.py`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "irongrad"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() or [str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file()]
    return {n for n in names if (ROOT / n).is_file() and not n.endswith(("/__init__.py", ".pyc"))}


def files_listed(page: str) -> list[str]:
    """The files that have a line in docs/dev/system.md: a list item below the heading of their folder."""
    folder, files = "", []
    for line in page.splitlines():
        if heading := re.match(r"#+ `(irongrad/[\w/]*)`$", line):
            folder = heading[1]
        elif item := re.match(r"- `([\w./]+)`: \S", line):
            files.append(folder + item[1])
    return files


def test_every_file_has_its_line() -> None:
    listed = files_listed((DEV / "system.md").read_text())
    assert sorted(set(listed)) == sorted(listed), "a file has two lines"
    assert set(listed) == files_of_the_package()


def test_every_folder_has_its_heading() -> None:
    headings = set(re.findall(r"^#+ `(irongrad/[\w/]*)`$", (DEV / "system.md").read_text(), re.MULTILINE))
    assert headings == {f"{p.parent.relative_to(ROOT)}/" for p in map(ROOT.joinpath, files_of_the_package())} | {
        f"{p.parent.relative_to(ROOT)}/" for p in PACKAGE.rglob("__init__.py")
    }


def test_lines_of_files_are_read() -> None:
    page = "## `irongrad/`\n\n- `a.py`: one.\n\n### `irongrad/b/`\n\nText.\n\n- `c.py`: two.\n"
    assert files_listed(page) == ["irongrad/a.py", "irongrad/b/c.py"]


def floors_told(page: str, heading: str) -> list[set[str]]:
    """The rows of the table below a text in docs/dev/system.md, highest floor first."""
    table = page.split(heading, 1)[1].split("| --- | --- |\n", 1)[1].split("\n\n", 1)[0]
    return [set(re.findall(r"`(\w+)`", row.split("|")[2])) for row in table.splitlines()]


@pytest.mark.parametrize(
    ("contract", "heading"), [("rooms", "## What a room may import"), ("stages", "The stages inside")]
)
def test_the_documented_floors_match_the_contracts(contract: str, heading: str) -> None:
    """A stage's folder has a floor; the files beside the stages have none of their own."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["id"] == contract)
    there = [set(re.findall(r"\w+", layer)) for layer in layers if contract == "rooms" or ":" not in layer]
    assert floors_told((DEV / "system.md").read_text(), heading) == there


def phases_told(page: str) -> list[tuple[str, list[str]]]:
    """The phases of docs/dev/iree-passes.md, each a heading, and the passes in it, each a heading below that."""
    told: list[tuple[str, list[str]]] = []
    for level, name in re.findall(r"^(###?) `([\w-]+)`$", page, re.MULTILINE):
        if level == "##":
            told.append((name, []))
        else:
            told[-1][1].append(name)
    return told


def test_every_phase_and_pass_is_told() -> None:
    there = [(phase.name, [kind.name for kind in phase.passes]) for phase in PHASES]
    assert phases_told((DEV / "iree-passes.md").read_text()) == there


def test_phases_and_passes_are_read() -> None:
    page = "## How\n\n## `flow`\n\n### `share-kernels`\n\n### Text\n\n## `vm`\n"
    assert phases_told(page) == [("flow", ["share-kernels"]), ("vm", [])]
