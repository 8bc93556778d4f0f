"""Names that Python accepts for arguments, in place of names from files, such as `input:0` of an ONNX model."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from itertools import count


def arguments_of(names: Iterable[str]) -> dict[str, str]:
    """The argument of each input; inputs whose names would be one in Python get a number, except for the one as is."""
    names = list(names)
    found = {name: name for name in names if identifier(name) == name}
    for name in names:
        plain = identifier(name)
        numbered = (plain if i == 1 else f"{plain}_{i}" for i in count(1))
        found.setdefault(name, next(n for n in numbered if n not in found.values()))
    return {name: found[name] for name in names}


def identifier(name: str) -> str:
    """Return a name that Python accepts for an argument."""
    plain = re.sub(r"\W", "_", name)
    return (
        f"_{plain}" if not plain or plain[0].isdigit() or keyword.iskeyword(plain) or plain in ("self", "v") else plain
    )
