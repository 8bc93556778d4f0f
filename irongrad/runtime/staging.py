"""Write an artifact beside its destination, and move it into place when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from irongrad.runtime.abandoned import remove_abandoned, unique
from irongrad.runtime.atomic_files import link_or_copy
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.exchange import exchange
from irongrad.runtime.manifest import (
    ANALYSIS,
    CHECKPOINT_HEADER,
    GOLDEN,
    INITIAL_STATE,
    MANIFEST,
    PORTABLE_MODULE,
    SIGNATURE,
)
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.scratch import held_directory

_STAGED, _VERSION = ".staged", ".version"
# A directory beside it has 40 bytes more, and file systems allow 255.
_LONGEST_NAME = 200


def check_output(output: Path) -> None:
    """Refuse to write over a file, or over a directory that is not an artifact, or where nothing can be written.

    Raises:
        UserError: names the file or directory.
    """
    _check_name(output)
    if output.is_dir() and any(output.iterdir()) and not (output / MANIFEST).exists():
        raise UserError(f"{output} is a directory with other things in it, not an artifact; give another -o")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; give a directory with -o")
    parent = next(p for p in (output.absolute().parent, *output.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{output} cannot be made: {parent} is not a directory that you may write to; give another -o")


def _check_name(output: Path) -> None:
    try:
        name = output.resolve().name.encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(output)!r} is no text in UTF-8; give another -o") from None
    except (OSError, RuntimeError) as error:  # a loop of symbolic links, a name that is too long
        raise UserError(f"{output} cannot be made: {getattr(error, 'strerror', None) or error}") from None
    if len(name) > _LONGEST_NAME:
        raise UserError(f"the name of {output} has {len(name)} bytes; give one of at most {_LONGEST_NAME} with -o")


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Yield a new directory beside `output`, and remove it afterwards unless it was published.

    What killed writers left is removed first.
    """
    output = _real(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(output, _VERSION, keep=output.resolve())
    with held_directory(output, _STAGED) as staging:
        yield staging


def publish(staging: Path, output: Path) -> None:
    """Put a complete artifact in the place of `output`; a reader sees the old one or the new one at every moment.

    What else is in the old directory is kept.

    The two directories are exchanged in one step. Where the file system cannot do that (NFS, some of FUSE), `output`
    becomes a symbolic link to a directory beside it, and the link is replaced in one step.

    Raises:
        OSError: the artifact cannot be moved; the old one is in its place.
    """
    output = _real(output)
    _carry_over(output, staging)
    while not output.is_symlink():
        with suppress(FileNotFoundError):  # somebody removed `output` just now
            if not output.exists() and _moved(staging, output):
                return
            if output.exists() and exchange(staging, output):
                return
            break
    _publish_behind_link(staging, output)


def _carry_over(output: Path, staging: Path) -> None:
    """Link to `staging` what is in the old directory beside the old artifact, such as a checkpoint of the user."""
    if not output.is_dir():
        return
    try:
        of_artifact = {ANALYSIS, MANIFEST, SIGNATURE, *read_manifest(output).files}
    except ArtifactError:  # damaged, or of another format: its files have the names of a new one's
        of_artifact = {MANIFEST, SIGNATURE, INITIAL_STATE, GOLDEN, PORTABLE_MODULE, CHECKPOINT_HEADER}
        of_artifact |= {p.name for p in output.glob("step.*.vmfb")}
    for path in output.iterdir():
        new = staging / path.name
        if path.name in of_artifact or new.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new, symlinks=True, copy_function=link_or_copy)
        else:
            link_or_copy(path, new)


def _moved(staging: Path, output: Path) -> bool:
    """Move a directory to a place where nothing is; return False if another publisher was first."""
    try:
        os.rename(staging, output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def _publish_behind_link(staging: Path, output: Path) -> None:
    version, link = _beside(output, _VERSION), _beside(output, _STAGED)
    old = output.resolve() if output.is_symlink() else None
    os.rename(staging, version)
    os.symlink(version.name, link)
    if not output.is_symlink() and output.exists():
        # Once for each output, if the first was published where the file system could exchange.
        os.rename(output, old := _beside(output, _VERSION))
    os.replace(link, output)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _real(output: Path) -> Path:
    """`output` with links followed, except a link that `publish` made."""
    absolute = output.absolute()
    real = absolute.parent.resolve() / absolute.name
    ours = real.is_symlink() and os.readlink(real).endswith(_VERSION)
    return real if ours else real.resolve()


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(f".{output.name}.{unique()}{suffix}")
