"""`irongrad run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from irongrad.cli.common import (
    base_option,
    console,
    device_option,
    directory_argument,
    json_option,
    load_npy,
    numbers,
    pairs,
    print_json,
    refuse_unwritable,
    target_option,
    trusted_option,
)
from irongrad.runtime import load
from irongrad.runtime.errors import UserError


@click.command(
    epilog="""\b
Example:
  irongrad run build/digits predict --input x=x.npy --checkpoint digits.safetensors --output logits.npy
"""
)
@directory_argument
@click.argument("entry")
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input; repeatable.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A hyperparameter; repeatable.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint to start from.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the state afterwards to this checkpoint.")
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="[NAME=]FILE.npy",
    help="Where to write an output; without NAME, the outputs in order. Outputs that are not written are printed.",
)
@base_option
@trusted_option
@target_option
@device_option
@json_option
def command(
    directory: Path,
    entry: str,
    inputs: tuple[str, ...],
    settings: tuple[str, ...],
    checkpoint: Path | None,
    save: Path | None,
    outputs: tuple[str, ...],
    base: Path | None,
    trusted: tuple[Path, ...],
    target: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Call one ENTRY point of the artifact in DIRECTORY."""
    if save is not None:
        refuse_unwritable(save, "--save")
    session = load(directory, target=target, device=device, checkpoint=checkpoint, base=base, trusted=trusted or None)
    arrays = {name: load_npy(name, path) for name, path in pairs(inputs, "--input").items()}
    results = session.call(entry, {**arrays, **numbers(settings, "--set")})
    point = session.entry(entry)
    named = dict(zip([s.name for s in point.outputs], results, strict=True))
    files = _files(outputs, list(named))
    for name, path in files.items():
        _write(path, named[name])
    if save is not None:
        session.save(save)
    left = {n: a for n, a in named.items() if n not in files}
    if as_json:
        print_json({"outputs": left, "files": files})
        return
    for name, array in left.items():
        console.print(f"{name}: {array.dtype}{list(array.shape)} = {np.array2string(array, threshold=20)}")
    for name, path in files.items():
        console.print(f"{name} -> {path}")


def _write(path: str, array: np.ndarray[Any, Any]) -> None:
    try:
        with open(path, "wb") as file:  # numpy.save would write to another name, with .npy at its end
            np.save(file, array)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror or error}") from None


def _files(outputs: tuple[str, ...], names: list[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    for position, item in enumerate(outputs):
        name, separator, path = item.partition("=")
        if not separator:
            name, path = (names[position] if position < len(names) else ""), item
        if name not in names:
            raise UserError(f"--output {item!r}: there is no such output; this entry point returns {', '.join(names)}")
        files[name] = path
    return files
