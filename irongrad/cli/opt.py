"""`irongrad opt`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from irongrad.cli.common import json_option, print_json


@click.command(
    epilog="""\b
Example:
  irongrad opt step.mlir --pass share-kernels
  irongrad opt step.mlir --pass drop-barriers --pass 'place-transients{alignment=256}' -o placed.mlir
"""
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--pass", "passes", metavar="NAME{OPTION=VALUE}", multiple=True, required=True, help="What to run; repeatable."
)
@click.option("--target", default="llvm-cpu", show_default=True, help="What the module is compiled for.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the module here, not to standard output.")
@json_option
def command(file: Path, passes: tuple[str, ...], target: str, output: Path | None, as_json: bool) -> None:
    """Run passes over IREE's module on FILE, a module as MLIR text or bytecode, and print the result as text.

    The module must be in the phase of the passes: `irongrad passes --iree` lists the phases. A pass without options has
    those that suit the target.
    """
    from iree.compiler import ir

    from irongrad.mlir.walk import parsed
    from irongrad.passes.module_pass import ModuleContext
    from irongrad.passes.registry import make_pass, split_passes
    from irongrad.pipeline.iree.phases import known_module_pass, run_passes_alone
    from irongrad.runtime.errors import UserError
    from irongrad.targets import parse_target

    context = ModuleContext(parse_target(target), data_tiling=True)
    chosen = []
    for name, options in (item for text in passes for item in split_passes(text)):
        kind = known_module_pass(name)
        chosen.append(make_pass(kind, options) if options else kind.of_context(context))
    results: list[dict[str, Any]] = []
    try:
        with parsed(file.read_bytes()) as module:
            run_passes_alone(chosen, module, lambda item, result: results.append({"pass": item.name, **asdict(result)}))
            text = str(module)
    except ir.MLIRError as error:
        raise UserError(f"{file} is no MLIR module: {error}") from None
    if output is not None:
        output.write_text(text)
    if as_json:
        print_json({"passes": results, "module": text})
    elif output is None:
        click.echo(text)
