"""The name under which Python imports a file, used instead of its path on this machine."""

from __future__ import annotations

import functools
import re
from pathlib import PurePath

from irongrad.runtime.loaded_modules import module_globals

FRAME = re.compile(r'File "([^"]+)", line (\d+),')

_paths: dict[str, str] = {}


@functools.cache
def portable(path: str) -> str:
    """Return the import path of the file at `path`; only its file name if no module is loaded from it.

    torch.fx numbers the code that it generates (`<eval_with_key>.12`). The number is dropped, because it depends on how
    much was traced before.
    """
    if path.startswith("<"):
        return path.partition(">")[0] + ">"
    module = next((n for n, names in module_globals() if names.get("__file__") == path), "__main__")
    pure = PurePath(path)
    depth = module.count(".") + (2 if pure.stem == "__init__" else 1)
    name = "/".join(pure.parts[-depth:])
    _paths[name] = path
    return name


def absolute(name: str) -> str:
    """Return the file that `portable` turned into `name` in this process; `name` itself if there is none."""
    return _paths.get(name, name)
