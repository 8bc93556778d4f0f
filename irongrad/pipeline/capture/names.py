"""Refuse names of modules, parameters and buffers that torch.fx and IREE cannot write."""

from __future__ import annotations

from unicodedata import category

from torch import nn

from irongrad.diagnostics.source_lines import where
from irongrad.runtime.errors import CaptureError

# What ends or continues a string in the code that torch.fx 2.13 writes, and in the parameters that IREE 3.13.0 prints
# into its bytecode: neither escapes it.
_UNQUOTED = frozenset('"\\\n\r\0')


def refuse_names(model: nn.Module) -> None:
    """Refuse a model with a name that has such a character.

    Raises:
        CaptureError: there is one; with the name.
    """
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())]
    broken = (path for path in paths if set(path) & _UNQUOTED or any(category(c) == "Cs" for c in path))
    if (path := next(broken, None)) is not None:
        raise CaptureError(
            f"{where(model)}: the name {path!a} has a character that cannot be written into a "
            "compiled step: a quotation mark, a backslash, a line break, or half of a surrogate pair. Rename the module"
        )
