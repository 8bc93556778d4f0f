"""Extract the message for the user from an IREE status."""

from __future__ import annotations

import re

from irongrad.runtime.refusals import without_number_of_false

_STATUS = re.compile(r"(?:[^\s:]+\.c(?:c|pp)?:\d+: )?([A-Z_]+); (.*)", re.DOTALL)
_OPAQUE_CODE = re.compile(r" \([0-9A-Fa-f]{8}\)")


def reason(error: Exception) -> str:
    """Return the message of an IREE status, without its source position and call stack."""
    text = str(error)
    match = _STATUS.search(text)
    body = (match.group(2) if match else text).split("; while ")[0].split("\n[ ")[0]
    if match and body.startswith("while "):  # a status without a message, such as a lost device's DATA_LOSS
        body = f"{match.group(1)} {body}"
    return without_number_of_false(_OPAQUE_CODE.sub("", body)).strip().rstrip(";")
