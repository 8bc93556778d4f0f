"""The report of artifacts in Chromium: the size of the page, and how long it takes to write, to open and to use.

    python benchmarks/report.py build/gpt build/resnet18

Milliseconds, medians of five pages opened one after the other.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, expect, sync_playwright

from irongrad.reports.page import page
from irongrad.reports.report import report_on

ROUNDS = 5
READY = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
ELEMENTS = "document.querySelectorAll('*').length"


def timed_page(tab: Page, path: Path) -> tuple[float, float, float]:
    """Milliseconds until the page can be used, until all its charts are drawn, and to open every module."""
    tab.goto(path.as_uri())
    ready = tab.evaluate(READY)
    start = time.perf_counter()
    for chart in tab.locator(".chart").all():
        if chart.is_visible():
            chart.scroll_into_view_if_needed()
            expect(chart).to_have_class(re.compile("drawn"))
    drawn = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    tab.get_by_role("button", name="Open all modules").click()
    tab.evaluate("() => document.body.offsetHeight")
    return ready, drawn, 1e3 * (time.perf_counter() - start)


def measure(tab: Page, artifact: Path, folder: Path) -> str:
    """A row of the table."""
    start = time.perf_counter()
    report = report_on(artifact)
    data = page(report)
    written = 1e3 * (time.perf_counter() - start)
    path = folder / f"{artifact.name}.html"
    path.write_bytes(data)
    times = [median(column) for column in zip(*(timed_page(tab, path) for _ in range(ROUNDS)), strict=True)]
    counts = f"{report.captured.count:,} | {report.compiled.count:,} | {tab.evaluate(ELEMENTS):,}"
    cells = [f"{len(data) / 1e6:.2f}", f"{written:.0f}", *(f"{milliseconds:.0f}" for milliseconds in times)]
    return f"| {artifact.name} | {counts} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    artifacts = parser.parse_args().artifacts
    print("| artifact | operators | launches | elements | MB | write | ready | charts | open all |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport={"width": 1300, "height": 900})
        for artifact in artifacts:
            print(measure(tab, artifact, Path(folder)), flush=True)
        browser.close()


if __name__ == "__main__":
    main()
