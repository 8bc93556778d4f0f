"""The name under which Python imports a file, in place of its path on this machine."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import PurePath

FRAME = re.compile(r'File "([^"]+)", line (\d+),')

_paths: dict[str, str] = {}


@functools.cache
def portable(path: str) -> str:
    """The file at `path` as it is imported; its name alone where no module is made of it.

    torch.fx numbers the code it makes (`<eval_with_key>.12`), which says how much was traced before.
    """
    if path.startswith("<"):
        return path.partition(">")[0] + ">"
    module = next((n for n, m in list(sys.modules.items()) if getattr(m, "__file__", None) == path), "__main__")
    pure = PurePath(path)
    depth = module.count(".") + (2 if pure.stem == "__init__" else 1)
    name = "/".join(pure.parts[-depth:])
    _paths[name] = path
    return name


def absolute(name: str) -> str:
    """The file that `portable` made `name` of in this process; `name` itself where it made none."""
    return _paths.get(name, name)
