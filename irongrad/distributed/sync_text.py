"""When ranks synchronise, as text on the command line."""

from __future__ import annotations

from irongrad.distributed.averaging import Nesterov
from irongrad.distributed.compression import Exact, Rounded
from irongrad.distributed.gradients import Gradients
from irongrad.distributed.local_steps import LocalSteps
from irongrad.runtime.errors import UserError
from irongrad.runtime.ranks.communicator import Communicator

FORMS = "gradients, local:STEPS or diloco:STEPS; and after the steps :bf16 or :int8 to send less"


def sync_of(text: str, ranks: Communicator) -> Gradients | LocalSteps:
    """Read `gradients`, `local:STEPS` or `diloco:STEPS`, the last two with `:bf16` or `:int8` behind.

    Raises:
        UserError: the text says nothing that exists.
    """
    name, every, form = parsed_sync(text)
    if name == "gradients":
        return Gradients(ranks)
    return LocalSteps(ranks, every, Nesterov() if name == "diloco" else None, Rounded(form) if form else Exact())


def parsed_sync(text: str) -> tuple[str, int, str]:
    """The way to synchronise, the number of steps between rounds, and the form in which changes are sent.

    Raises:
        UserError: the text says nothing that exists.
    """
    name, *options = text.split(":")
    if name == "gradients" and not options:
        return name, 1, ""
    form = options[1] if len(options) == 2 else ""
    known = name in ("local", "diloco") and len(options) in (1, 2) and options[0].isdecimal() and int(options[0]) > 0
    if not known or (len(options) == 2 and form not in ("bf16", "int8")):
        raise UserError(f"--sync {text!r}: it must be {FORMS}")
    return name, int(options[0]), form
