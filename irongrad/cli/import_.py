"""`irongrad import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from irongrad.bundle import INDEX, is_bundle
from irongrad.cli.common import console, json_option, print_json
from irongrad.runtime.errors import UserError

if TYPE_CHECKING:
    from irongrad.pipeline.package import Artifact


@click.command(
    epilog="""\b
Example:
  irongrad import build/digits.jax -o build/digits --target llvm-cpu
"""
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact's directory.")
@click.option(
    "--target", "targets", multiple=True, default=["llvm-cpu"], show_default=True, help="What to compile for."
)
@click.option("--entry-point", "entry_points", multiple=True, help="Include only these entry points; repeatable.")
@click.option("--cache/--no-cache", default=True, help="Take what was compiled before from the cache on disk.")
@json_option
def command(
    source: Path,
    output: Path,
    targets: tuple[str, ...],
    entry_points: tuple[str, ...],
    cache: bool,
    as_json: bool,
) -> None:
    """Compile the training step in SOURCE, a bundle that irongrad.jax.export_step wrote.

    The result is verified against JAX in float64 before it is written.
    """
    from irongrad.pipeline.bundles import import_bundle

    if not is_bundle(source):
        raise UserError(f"{source} is no bundle: it has no {INDEX}. Write one with irongrad.jax.export_step")
    with console.status(f"importing {source}"):
        artifact = import_bundle(source, output, targets, entry_points=entry_points or None, cache=cache)
    show(artifact, as_json=as_json)


def show(artifact: Artifact, *, as_json: bool) -> None:
    """Print what was written, and how it was verified."""
    manifest = artifact.manifest
    worst = {t.name: t.certificate.worst if t.certificate else None for t in manifest.targets}
    if as_json:
        print_json({"output": artifact.directory, "targets": worst})
        return
    for target in manifest.targets:
        size = manifest.files[target.file].size / 1024
        note = (
            f"verified: {target.certificate.steps} steps against {target.certificate.oracle}, worst error "
            f"{target.certificate.worst:.0%} of what is allowed"
            if target.certificate is not None
            else "not verified: it cannot run here; run 'irongrad verify' on the device"
        )
        console.print(f"{artifact.directory / target.file}: {size:.0f} KiB, {note}", highlight=False, soft_wrap=True)
