"""The report opens in a real browser without a network, says what `--json` says, and no name escapes into its code."""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from torch import nn

import irongrad as ig
from irongrad.cli import compile as compile_verb
from irongrad.cli import profile as profile_verb
from irongrad.cli import report as report_verb
from irongrad.runtime.errors import ArtifactError, IronGradError, UserError
from irongrad.runtime.manifest import ANALYSIS
from irongrad.runtime.manifest_file import file_spec, read_manifest, write_manifest

CHROMIUM = shutil.which("chromium")
expect.set_options(timeout=30_000)  # a machine may be busy

SCRIPT = "</script><script>alert(1)</script>"
IMAGE = "\"><img src=x onerror=alert(1)>'"
FILE = "<img src=x onerror=alert(1)>.py"
MARKUP = "<b>&lt;[red]|ü</b>{{ 7 * 7 }}"

# Its file, a module, a line, and a key of its state are hostile to HTML, to JSON in HTML, and to labels of charts.
STEP = f"""
import torch
from torch import nn

import irongrad as ig


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({{{SCRIPT!r}: nn.Linear(6, 8), {MARKUP!r}: nn.Linear(8, 8)}})
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for part in self.parts.values():
            x = torch.tanh(part(x)).softmax(-1)  # {SCRIPT}{IMAGE}
        return self.head(x)


def make_step():
    torch.manual_seed(0)
    model = Net()
    inputs = {{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}}
    return ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters()), inputs)
"""
SECTIONS = ["Overview", "Model", "Passes", "Fusion", "Memory", "Roofline", "Kernel times", "Guards", "State"]


def run(command: Any, *arguments: object) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture(scope="module", autouse=True)
def _peaks_are_measured_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("IRONGRAD_CACHE_SIZE", "1GiB")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a hostile artifact in `net`, what its compilation printed, and its report."""
    folder = tmp_path_factory.mktemp("report")
    step = folder / FILE
    step.write_text(STEP)
    entries = ("--entry-point", "train_step", "--entry-point", "predict")
    said = run(compile_verb.command, f"{step}:make_step", "-o", folder / IMAGE, *entries)
    (folder / "said.txt").write_text(said)
    run(report_verb.command, folder / IMAGE, "-o", folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    return folder / IMAGE


@pytest.fixture(scope="module")
def data(artifact: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(report_verb.command, artifact, "--json"))
    return found


@pytest.fixture(scope="module")
def profile(folder: Path, artifact: Path) -> Path:
    """A profile of the artifact's step."""
    path = folder / "profile.json"
    run(profile_verb.command, artifact, "--steps", 2, "-o", path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Opened:
    """The report in a browser without a network, and what went wrong there."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, reduced_motion="reduce", **options)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda said: self.problems.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request", lambda request: self.problems.append(request.url) if self.outside(request.url) else None
        )
        self.page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        self.path = path
        self.page.goto(path.as_uri())

    def outside(self, url: str) -> bool:
        return url != self.path.as_uri() and not url.startswith(("data:", "blob:"))


@pytest.fixture
def opened(browser: Browser, folder: Path) -> Iterator[Opened]:
    """The report; a test fails if it complained, or asked for anything."""
    found = Opened(browser, folder / "report.html", viewport={"width": 1300, "height": 900}, color_scheme="light")
    yield found
    found.context.close()
    assert found.problems == []


@pytest.fixture
def page(opened: Opened) -> Page:
    return opened.page


def values(cells: Locator) -> list[float]:
    """The exact numbers of cells."""
    return [float(value) for value in cells.evaluate_all("cells => cells.map(cell => cell.dataset.value)")]


def column(page: Page, section: str, number: int) -> list[float]:
    """The numbers of a column of the first table of a section."""
    return values(page.locator(f"#{section} table").first.locator(f"tbody tr > td:nth-child({number})"))


def test_every_section_opens_and_draws_its_charts(page: Page) -> None:
    for title in SECTIONS:
        page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()
        section = page.get_by_role("region", name=title, exact=True)
        expect(section.get_by_role("heading", name=title, exact=True)).to_be_in_viewport()
        for chart in section.locator("[data-chart]").all():
            if chart.is_visible():
                chart.scroll_into_view_if_needed()
                expect(chart.locator(".main-svg").first).to_be_visible()
    drawn = page.locator(".drawn").evaluate_all("charts => charts.map(chart => chart.dataset.chart)")
    assert {"errors", "phases", "modules", "passes", "memory.0", "roofline"} <= set(drawn)


def test_every_verified_value_stands_beside_its_bound(page: Page, data: dict[str, Any]) -> None:
    manifest, judged = data["manifest"], data["judged"]
    table = page.get_by_role("table", name="Verified values")
    rows = table.locator("tbody tr")
    assert [values(rows.locator(f"td:nth-child({n})")) for n in (4, 5)] == [
        [value["error"] for value in judged],
        [value["allowed"] for value in judged],
    ]
    assert rows.locator("td:first-child").all_text_contents() == [value["key"] for value in judged]
    shares = [value["error"] / value["allowed"] for value in judged]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == manifest["targets"][0]["certificate"]["worst"]
    parameters = {spec["name"] for spec in manifest["state"] if spec["role"] == "parameter"}
    assert {f"state/1/{name}" for name in parameters} <= {value["key"] for value in judged}


def test_the_tree_has_the_numbers_of_json(page: Page, data: dict[str, Any]) -> None:
    def check(module: dict[str, Any], node: Locator) -> int:
        captured, compiled = module["captured"], module["compiled"]
        assert values(node.locator(":scope > summary > .cell")) == [
            captured["flops"],
            captured["read"] + captured["written"],
            compiled["count"],
            compiled["read"] + compiled["written"],
        ]
        assert node.locator(":scope > summary b").text_content() == module["name"]
        inside = node.locator(":scope > .kids > .module").all()
        return 1 + sum(check(child, where) for child, where in zip(module["children"], inside, strict=True))

    checked = check(data["model"], page.locator("#tree > .module"))
    assert checked == page.locator("#tree .module").count() > 5
    assert data["model"]["captured"] | {"name": ""} == data["captured"] | {"name": ""}
    assert data["model"]["compiled"] | {"name": ""} == data["compiled"] | {"name": ""}


def test_the_tree_goes_down_to_operators_and_kernels(page: Page, data: dict[str, Any]) -> None:
    page.get_by_role("button", name="Open all modules").click()
    operators = page.locator(".operator", has_text="aten.tanh.default")
    line = page.locator("#tree .line", has=operators).first
    operator = line.locator(operators).first
    expect(operator).to_be_hidden()
    assert "torch.tanh(part(x))" in (line.locator("summary").text_content() or "")
    line.locator("summary").press("Enter")
    expect(operator).to_be_visible()
    kernels = page.locator("#tree .kernel code").all_text_contents()
    assert set(kernels) == {group["work"]["name"] for group in data["groups"]}


def test_tables_have_the_numbers_of_json(page: Page, data: dict[str, Any]) -> None:
    works = [group["work"] for group in data["groups"]]
    assert column(page, "fusion", 3) == [work["count"] for work in works]
    assert column(page, "fusion", 5) == [work["read"] + work["written"] for work in works]
    assert column(page, "passes", 4) == [change["after"] for change in data["passes"]]
    (joint,) = (memory for memory in data["memory"] if memory["function"] == "joint")
    assert column(page, "memory", 2) == [value["nbytes"] for value in joint["alive"]]
    assert sum(value["nbytes"] for value in joint["alive"]) == joint["peak"]
    names = page.locator("#state tbody tr td:first-child code:first-child").all_text_contents()
    assert names == [spec["name"] for spec in data["manifest"]["state"]]
    files = page.locator("#overview .hash").all_text_contents()
    assert {spec["sha256"] for spec in data["manifest"]["files"].values()} <= set(files)


def test_tables_sort_and_filter(page: Page, data: dict[str, Any]) -> None:
    launches = sorted((group["work"]["count"] for group in data["groups"]), reverse=True)
    header = page.locator("#fusion").get_by_role("columnheader", name="Launches")
    header.get_by_role("button").press("Enter")
    assert column(page, "fusion", 3) == launches
    assert header.get_attribute("aria-sort") == "descending"
    header.get_by_role("button").press("Enter")
    assert column(page, "fusion", 3) == launches[::-1]
    page.locator("#state").get_by_role("searchbox").fill("HEAD.weight")
    shown = page.locator("#state tbody tr:visible td:first-child code:first-child").all_text_contents()
    assert shown == [s["name"] for s in data["manifest"]["state"] if "head.weight" in f"{s['name']} {s['aliases']}"]


def test_the_tree_finds_a_module(page: Page) -> None:
    page.get_by_label("Find a module").fill("head")
    found = page.locator("#tree .module:visible > summary b").all_text_contents()
    assert found == ["step", "model", "head"]
    page.get_by_label("Find a module").fill("nothing like it")
    assert page.locator("#tree .module:visible").count() == 0


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the report")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    unreachable = page.locator("main details > summary, main button, main input, main .table").evaluate_all(
        "found => found.filter(each => each.tabIndex < 0).length"
    )
    assert unreachable == 0


def drawn(page: Page, name: str) -> Locator:
    """A chart, when it is drawn."""
    chart = page.locator(f"[data-chart={name}]")
    chart.scroll_into_view_if_needed()
    expect(chart).to_have_class(re.compile("drawn"))
    return chart


def test_a_chart_can_be_saved_and_not_sent(page: Page) -> None:
    chart = drawn(page, "roofline")
    buttons = chart.locator(".modebar-btn")
    assert buttons.evaluate_all("found => found.map(each => each.ariaLabel)") == ["Download plot as a PNG"]
    chart.hover()
    with page.expect_download() as saved:
        buttons.click()
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def ink(page: Page) -> str:
    """The colour of a chart's text."""
    found: str = drawn(page, "passes").locator(".xtick text").first.evaluate("text => getComputedStyle(text).fill")
    return found


def test_light_and_dark(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background), ink(page)
    page.get_by_role("button", name="Dark").click()
    page.wait_for_timeout(300)
    dark = page.evaluate(background), ink(page)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.get_by_role("button", name="Light").click()
    page.wait_for_timeout(300)
    assert (page.evaluate(background), ink(page)) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == light[0], "the button chose light"


def test_the_page_fits_a_phone_and_paper(browser: Browser, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html", viewport={"width": 360, "height": 740}, color_scheme="dark")
    page = opened.page
    for title in SECTIONS:
        page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()
    page.get_by_role("button", name="Open all modules").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.emulate_media(media="print")
    expect(page.get_by_role("navigation")).to_be_hidden()
    assert len(page.pdf()) > 10_000
    opened.context.close()
    assert opened.problems == []


def test_hostile_names_are_shown_and_do_nothing(page: Page, data: dict[str, Any]) -> None:
    assert page.locator("img").count() == 0
    assert page.locator("body script").count() == 3
    assert page.locator("h1").text_content() == IMAGE
    assert page.title().startswith(IMAGE)
    modules = page.locator("#tree .module > summary b").all_text_contents()
    assert {SCRIPT, MARKUP} <= set(modules)
    lines = page.locator("#tree .line .text").all_text_contents()
    assert any(SCRIPT + IMAGE in line for line in lines)
    places = page.locator("#tree .line .place").all_text_contents()
    assert any(place.startswith(f"{FILE}:") for place in places)
    labels = drawn(page, "modules").locator("text").all_text_contents()
    assert {name for name in (SCRIPT, MARKUP) if any(label.startswith(name) for label in labels)} == {SCRIPT, MARKUP}
    assert MARKUP in json.dumps(data["model"], ensure_ascii=False)


def test_the_page_is_small_and_runs_no_other_script(folder: Path) -> None:
    text = html.unescape((folder / "report.html").read_text())
    assert len(text) < 4_000_000
    assert "script-src 'sha256-" in text
    assert "unsafe-inline" not in text.partition("script-src")[2].partition(";")[0]


def test_another_entry_point(artifact: Path, tmp_path: Path) -> None:
    run(report_verb.command, artifact, "--entry", "predict", "-o", tmp_path / "predict.html")
    found = json.loads(run(report_verb.command, artifact, "--entry", "predict", "--json"))
    assert {work["name"] for work in found["phases"]} == {"evaluation"}
    assert "one call of <code>predict</code>" in (tmp_path / "predict.html").read_text()


def test_a_page_goes_to_the_standard_output(folder: Path, artifact: Path) -> None:
    assert run(report_verb.command, artifact, "-o", "-") == (folder / "report.html").read_text()


def test_the_page_of_a_placed_step_is_about_all_parts(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    inputs = {"x": torch.randn(4, 8), "y": torch.randint(0, 5, (4,))}
    step = ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), inputs)
    parts = {"0": "llvm-cpu", "2": "llvm-cpu"}
    ig.compile(step, tmp_path / "net", place=parts, entry_points=["train_step"])
    run(report_verb.command, tmp_path / "net", "-o", tmp_path / "net.html")
    found = json.loads(run(report_verb.command, tmp_path / "net", "--json"))
    opened = Opened(browser, tmp_path / "net.html")
    launches = f"{found['compiled']['count']:,}"
    assert launches in opened.page.locator(".cards").first.inner_text()
    assert "one call of train_step on all parts" in opened.page.locator(".about").inner_text()
    opened.context.close()
    assert opened.problems == []
    assert {work["name"] for work in found["phases"]} == {"forward", "backward", "update"}


def test_a_profile_gives_times(browser: Browser, folder: Path, artifact: Path, profile: Path) -> None:
    page_file = folder / "timed.html"
    run(report_verb.command, artifact, "--profile", profile, "-o", page_file)
    found = json.loads(run(report_verb.command, artifact, "--profile", profile, "--json"))
    measured = json.loads(profile.read_text())
    opened = Opened(browser, page_file)
    drawn(opened.page, "times")
    drawn(opened.page, "roofline")
    assert column(opened.page, "times", 3) == [kernel["seconds"] for kernel in measured["kernels"]]
    whole = sum(span["seconds"] for span in measured["spans"])
    assert found["model"]["seconds"] == pytest.approx(whole)
    assert values(opened.page.locator("#tree > .module > summary > .cell:last-child")) == [found["model"]["seconds"]]
    opened.context.close()
    assert opened.problems == []


def test_the_profile_of_something_else_is_refused(artifact: Path, profile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(profile.read_text()) | {"digest": "0" * 64}))
    text = tmp_path / "text.json"
    text.write_text("hello")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--profile", other), "is the profile of another artifact"),
        (("--profile", text), "is no profile that 'irongrad profile' wrote"),
        (("--profile", tmp_path / "none.json"), "cannot be read: No such file"),
        (("--profile", profile, "--entry", "predict"), "is the profile of train_step on llvm-cpu, not of predict"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            run(report_verb.command, artifact, *arguments, "-o", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_compile_ends_with_the_command_of_the_report(folder: Path, artifact: Path) -> None:
    last = (folder / "said.txt").read_text().splitlines()[-1]
    assert last.startswith("see it: irongrad report ")
    assert "-o " in last


def damaged(artifact: Path, folder: Path, record: bytes | None, *, listed: bool = True) -> Path:
    """A copy of the artifact with another record; `listed` if the manifest has its hash."""
    shutil.copytree(artifact, folder)
    (folder / ANALYSIS).unlink()
    if record is not None:
        (folder / ANALYSIS).write_bytes(record)
        if listed:
            manifest = read_manifest(folder)
            files = {**manifest.files, ANALYSIS: file_spec(folder / ANALYSIS)}
            write_manifest(replace(manifest, files=files), folder)
    return folder


def test_a_bad_artifact_is_one_clear_line_and_leaves_the_old_page(artifact: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("the old page")
    newer = gzip.compress(json.dumps({"format_version": 99}).encode())
    cases = {
        "none": (None, True, "has no analysis.json.gz"),
        "damaged": (b"hello", True, "is damaged"),
        "newer": (newer, True, "has version 99"),
        "changed": (b"hello", False, "is damaged"),
    }
    for name, (record, listed, message) in cases.items():
        folder = damaged(artifact, tmp_path / name, record, listed=listed)
        with pytest.raises(ArtifactError, match=message) as raised:
            run(report_verb.command, folder, "-o", page)
        assert "\n" not in str(raised.value)
    with pytest.raises(IronGradError, match="manifest.json"):
        run(report_verb.command, tmp_path / "nowhere", "-o", page)
    assert page.read_text() == "the old page"


def test_bad_arguments_are_one_clear_line(artifact: Path, tmp_path: Path) -> None:
    cases: list[tuple[tuple[object, ...], str]] = [
        ((), "give the page to write"),
        (("-o", "-", "--json"), "would both write to the standard output"),
        (("-o", tmp_path), "cannot be written: Is a directory"),
        (("-o", artifact / "manifest.json"), "would be a file of the artifact"),
        (("-o", tmp_path / "r.html", "--entry", "nothing"), "launches no kernels; those that do are train_step"),
        (("-o", tmp_path / "r.html", "--target", "cuda"), "nothing is recorded for the target 'cuda'"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            run(report_verb.command, artifact, *arguments)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_names_the_extra(
    package: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package or n.startswith("irongrad.reports.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package {package}.*: pip install 'irongrad\[report\]'"):
        run(report_verb.command, artifact, "-o", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
