"""`irongrad compile`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from irongrad.cli.common import console, json_option, print_json
from irongrad.runtime.errors import UserError

if TYPE_CHECKING:
    from irongrad.pipeline.package import Artifact
    from irongrad.step import TrainStep


@click.command(
    epilog="""\b
Example:
  irongrad compile examples/digits.py:make_step -o build/digits --target llvm-cpu
"""
)
@click.argument("source", metavar="FILE:FUNCTION")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact's directory.")
@click.option(
    "--target", "targets", multiple=True, default=["llvm-cpu"], show_default=True, help="What to compile for."
)
@click.option("--entry-point", "entry_points", multiple=True, help="Include only these entry points; repeatable.")
@click.option("--dump-dir", type=click.Path(path_type=Path), help="Write every stage's readable form here.")
@click.option("--stop-after", metavar="STAGE", help="Stop after this stage.")
@click.option("--depfile", type=click.Path(path_type=Path), help="Write the source files this depends on, for builds.")
@json_option
def command(
    source: str,
    output: Path,
    targets: tuple[str, ...],
    entry_points: tuple[str, ...],
    dump_dir: Path | None,
    stop_after: str | None,
    depfile: Path | None,
    as_json: bool,
) -> None:
    """Compile the training step that FUNCTION in the Python file FILE returns.

    The result is verified against eager float64 before it is written.
    """
    from irongrad.pipeline.driver import STAGES, build, make_options

    @contextmanager
    def show(stage: str) -> Iterator[None]:
        with console.status(f"{stage} ({STAGES.index(stage) + 1}/{len(STAGES)})"):
            yield

    options = make_options(
        output,
        targets,
        entry_points=entry_points or None,
        dump_dir=dump_dir,
        stop_after=stop_after,
        on_stage=None if as_json else show,
    )
    step, files = load_step(source)
    artifact, seconds = build(step, options)
    if depfile is not None and artifact is not None:
        _write_depfile(depfile, output, files)
    if as_json:
        print_json(_summary(artifact, seconds))
    else:
        _print(artifact, seconds)


def load_step(source: str) -> tuple[TrainStep, list[Path]]:
    """Import FILE and call FUNCTION; also return the Python files that this imported from beside FILE.

    Raises:
        UserError: no such file or function, or it returns something else.
    """
    from irongrad.step import TrainStep

    path, _, name = source.rpartition(":")
    if not path or not name:
        raise UserError(f"{source!r} is not FILE:FUNCTION; write for instance examples/digits.py:make_step")
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{path} does not exist")
    before = set(sys.modules)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{path} has no function {name!r}; it has {', '.join(there)}")
    step = function()
    if not isinstance(step, TrainStep):
        raise UserError(f"{source} returned a {type(step).__name__}; it must return an irongrad.TrainStep")
    return step, [file, *_local_modules(before, file.parent)]


def _local_modules(before: set[str], directory: Path) -> list[Path]:
    new = [sys.modules[n] for n in set(sys.modules) - before]
    files = {Path(f).resolve() for m in new if (f := getattr(m, "__file__", None))}
    return sorted(f for f in files if f.is_relative_to(directory) and "site-packages" not in f.parts)


def _write_depfile(path: Path, output: Path, files: list[Path]) -> None:
    """A Makefile rule, as `cc -MD` writes, that Ninja and Make read."""
    escaped = " ".join(str(f).replace(" ", "\\ ") for f in dict.fromkeys(files))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{str(output / 'manifest.json').replace(' ', chr(92) + ' ')}: {escaped}\n")


def _summary(artifact: Artifact | None, seconds: dict[str, float]) -> dict[str, Any]:
    result: dict[str, Any] = {"seconds": seconds, "output": None}
    if artifact is not None:
        result["output"] = str(artifact.directory)
        result["targets"] = {
            t.name: {
                "bytes": artifact.manifest.files[t.file].size,
                "worst": t.certificate.worst if t.certificate else None,
            }
            for t in artifact.manifest.targets
        }
    return result


def _print(artifact: Artifact | None, seconds: dict[str, float]) -> None:
    table = Table("stage", "seconds", box=None)
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    if artifact is None:
        console.print("stopped as asked; no artifact was written")
        return
    for target in artifact.manifest.targets:
        size = artifact.manifest.files[target.file].size / 1024
        if target.certificate is not None:
            note = (
                f"verified: {target.certificate.steps} steps against eager {target.certificate.oracle}, worst error "
                f"{target.certificate.worst:.0%} of what is allowed"
            )
        else:
            note = "not verified: it cannot run here; run 'irongrad verify' on the device"
        console.print(f"{artifact.directory / target.file}: {size:.0f} KiB, {note}", highlight=False)
