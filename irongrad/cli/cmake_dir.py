"""`irongrad cmake-dir`."""

from __future__ import annotations

import click

from irongrad.cli.common import json_option, print_json
from irongrad.runtime.installed import PACKAGE


@click.command(
    epilog="""\b
Example:
  cmake -B build -DIronGrad_DIR=$(irongrad cmake-dir)
"""
)
@json_option
def command(as_json: bool) -> None:
    """Print the directory of IronGradConfig.cmake, for CMake's find_package(IronGrad)."""
    directory = str(PACKAGE.resolve() / "cmake")
    if as_json:
        print_json({"directory": directory})
    else:
        print(directory)
