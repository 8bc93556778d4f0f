"""`irongrad report`: one page about an artifact, for a browser."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from irongrad.cli.common import console, directory_argument, json_option, print_json, refuse_unwritable
from irongrad.reports.report import Report, report_on
from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError

_STDOUT = Path("-")


@click.command(
    epilog="""\b
Example:
  irongrad report build/gpt -o report.html
  irongrad report build/gpt --profile profile.json -o report.html
"""
)
@directory_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page to write, such as report.html; - for the standard output.",
)
@click.option("--entry", help="The entry point to report on; the training step, or the profiled one, by default.")
@click.option("--target", help="Which of the artifact's targets; the first by default.")
@click.option("--profile", type=click.Path(path_type=Path), help="A profile that 'irongrad profile' wrote, for times.")
@json_option
def command(
    directory: Path, output: Path | None, entry: str | None, target: str | None, profile: Path | None, as_json: bool
) -> None:
    """Write a page about the artifact in DIRECTORY: its model, kernels, passes, memory and guards.

    The page is one file that needs no network. --json prints the same data.
    """
    if output is None and not as_json:
        raise UserError("give the page to write, such as -o report.html, or --json")
    piped = output == _STDOUT
    if piped and as_json:
        raise UserError("-o - and --json would both write to the standard output")
    if output is not None and not piped:
        refuse_unwritable(output, "-o")
        if directory.resolve() in output.resolve().parents:
            raise UserError(f"{output} would be a file of the artifact. Write the page somewhere else")
    report = report_on(directory, entry, target, profile)
    if piped:
        click.echo(_page(report), nl=False)
    elif output is not None:
        atomic_write(output, _page(report))
    if as_json:
        print_json(asdict(report))
    elif output is not None and not piped:
        size = readable(output.stat().st_size)
        console.print(f"{output}: {size}, opens in any browser", highlight=False, soft_wrap=True)


def _page(report: Report) -> bytes:
    """The page.

    Raises:
        UserError: a package of the extra `report` is missing.
    """
    try:
        from irongrad.reports.page import page
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs the package {error.name}: pip install 'irongrad[report]'") from None
    return page(report)
