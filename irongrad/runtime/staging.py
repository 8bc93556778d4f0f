"""Write an artifact beside its destination, and move it into place when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import MANIFEST


def check_output(output: Path) -> None:
    """Refuse to write over a file, or over a directory that is not an artifact.

    Raises:
        UserError: names the file or directory.
    """
    if output.is_dir() and any(output.iterdir()) and not (output / MANIFEST).exists():
        raise UserError(f"{output} is a directory with other things in it, not an artifact; give another -o")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; give a directory with -o")


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Yield a new directory beside `output`, and remove it afterwards unless it was published."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        staging.chmod(0o755)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, output: Path) -> None:
    """Move a complete artifact into place."""
    old = staging.with_name(staging.name + ".old")
    if output.exists():
        os.rename(output, old)
    os.rename(staging, output)
    shutil.rmtree(old, ignore_errors=True)
