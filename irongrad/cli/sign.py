"""`irongrad sign`."""

from __future__ import annotations

from pathlib import Path

import click

from irongrad.cli.common import console, json_option, print_json
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.signatures import new_key, sign


@click.command(
    epilog="""\b
Example:
  irongrad sign --new-key release.key
  irongrad sign build/digits --key release.key
  python -c "import irongrad as ig; ig.load('build/digits', trusted='release.key.pub')"
"""
)
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="The private key, a PEM file.")
@click.option("--new-key", "new", type=click.Path(path_type=Path), help="Make a key, and its public key FILE.pub.")
@json_option
def command(directory: Path | None, key: Path | None, new: Path | None, as_json: bool) -> None:
    """Sign the artifact in DIRECTORY, so that `load(..., trusted=PUBLIC_KEY)` accepts it."""
    made: dict[str, Path] = {}
    if new is not None:
        made |= {"key": new, "public_key": new_key(new)}
    if directory is not None:
        if (used := key or new) is None:
            raise UserError("give the private key with --key, or make one with --new-key")
        made["signature"] = sign(directory, read_manifest(directory), used)
    if not made:
        raise UserError("give the artifact to sign, or make a key with --new-key")
    if as_json:
        print_json(made)
        return
    for name, path in made.items():
        console.print(f"{name.replace('_', ' ')}: {path}", highlight=False)
