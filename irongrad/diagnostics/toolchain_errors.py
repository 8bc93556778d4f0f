"""Reduce a compiler's output to what helps: its first error, the user's line, and the dumped module."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from irongrad.diagnostics.portable_paths import absolute
from irongrad.diagnostics.source_lines import is_user_file
from irongrad.runtime.errors import IronGradError, ToolchainError, UnsupportedOpError

_LOCATION = re.compile(r'"?([^"\s()<>]+\.py)"?:(\d+)(?::\d+)?')
# An operator for which torch-mlir has no lowering, or which torch-mlir does not know.
_OPERATOR = re.compile(
    r"failed to legalize operation '(torch\.(?:aten|prims?)\.[\w.]+)'"
    r'|"torch\.operator".*?name = "(torch\.[\w.]+)"'
)
_TYPES = re.compile(r" : (\([^()]*\) -> [^\n]+?)(?: loc\(|$)", re.MULTILINE)
_ERROR = re.compile(r"^.*\berror: .*$", re.MULTILINE)


def toolchain_error(tool: str, result: subprocess.CompletedProcess[str], module: Path) -> ToolchainError:
    """Describe a failed run of `tool` on the file `module`, which is copied to a directory that survives the run."""
    kept = Path(tempfile.mkdtemp(prefix="irongrad-")) / module.name
    shutil.copyfile(module, kept)
    output = result.stderr or result.stdout
    errors = _ERROR.findall(output)
    if result.returncode < 0 and not errors:
        summary = f"{tool} crashed with signal {-result.returncode}: {output.strip()[-300:]}"
    else:
        summary = (errors[0] if errors else output.strip()[-300:])[:600]
    lines = [f"{tool} failed: {summary}"]
    if source := _user_line(output):
        lines.append(f"the operator comes from {source}")
    lines.append(f"the module is kept at {kept}; the command was: {' '.join(result.args)}")
    return ToolchainError("\n  ".join(lines))


def lowering_error(result: subprocess.CompletedProcess[str], module: Path) -> IronGradError:
    """Describe a failed run of torch-mlir.

    If torch-mlir names an operator, the error refuses the operator. Otherwise it reports a failed tool.
    """
    output = result.stderr
    match = _OPERATOR.search(output)
    if match is None:
        return toolchain_error("torch-mlir", result, module)
    operator = (match[1] or match[2]).removeprefix("torch.")
    types = _TYPES.search(output, match.end())
    given = f" with the types {types[1]}" if types else ""
    place = _user_line(output) or "(line unknown)"
    return UnsupportedOpError(
        f"{place}\n  {operator} cannot be lowered by torch-mlir {version('torch-mlir')}{given}. Use other arguments, "
        "or write it with other operators"
    )


def _user_line(output: str) -> str | None:
    for name, number in _LOCATION.findall(output):
        path = absolute(name)
        if is_user_file(path) and Path(path).is_file():
            lines = Path(path).read_text(errors="replace").splitlines()
            text = lines[int(number) - 1].strip() if 0 < int(number) <= len(lines) else ""
            return f"{path}:{number}: {text}"
    return None
