"""A grid that hands a strategy only parameters that are the artifact's own, and finite."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from irongrad.integrations.flower.records import parameters_in
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Manifest

_LOG = logging.getLogger("flwr")


class CheckedGrid:
    """Flower's grid, which leaves out the replies of clients that a strategy must not average.

    Flower's own strategies compare names alone: they would average NaN, and add arrays of shapes that numpy broadcasts.
    They also end a run without an error when no client could train.
    """

    def __init__(self, grid: Grid, manifest: Manifest) -> None:
        self._grid, self._manifest = grid, manifest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and return the replies; see `Grid`.

        Raises:
            UserError: of the clients that were to train, none did.
        """
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        if not sent or not _is_training(sent[0]):
            return replies
        reasons = {_node(reply): _reason(reply, self._manifest) for reply in replies}
        if all(reasons.values()):
            listed = "; ".join(f"client {node}: {reason}" for node, reason in reasons.items())
            raise UserError(f"of {len(sent)} clients none sent parameters in this round: {listed or 'no replies'}")
        return [reply for reply in replies if reply.has_error() or not _left_out(reply, reasons[_node(reply)])]


def _reason(reply: Message, manifest: Manifest) -> str:
    """Why a reply must not be averaged; empty if it may."""
    if reply.has_error():
        return str(reply.error.reason)
    try:
        parameters_in(reply.content, manifest, "the client")
    except UserError as error:
        return str(error)
    return ""


def _left_out(reply: Message, reason: str) -> bool:
    """Whether there is a reason to leave a reply out, which goes into the log; a strategy logs error replies itself."""
    if reason:
        _LOG.warning("client %d is left out of this round: %s", _node(reply), reason)
    return bool(reason)


def _node(reply: Message) -> int:
    return int(reply.metadata.src_node_id)


def _is_training(message: Message) -> bool:
    return str(message.metadata.message_type).partition(".")[0] == str(MessageType.TRAIN)
