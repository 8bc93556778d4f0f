"""Ranks over torch.distributed, for programs that have PyTorch and its process groups already."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import RankLostError, UserError
from irongrad.runtime.ranks.communicator import Communicator, Request


class _Work:
    """A collective of torch.distributed that was started, and what it works on."""

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self._work, self._tensors = work, tensors

    def test(self) -> bool:
        """See `Request`."""
        if not self._work.is_completed():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait without keeping a core busy.

        Raises:
            RankLostError: a rank is gone.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(error) from error


class TorchCommunicator:
    """The ranks of a process group of torch.distributed with the backend `gloo`.

        torch.distributed.init_process_group("gloo")
        session.attach(irongrad.TorchCommunicator())

    All processes of the group make one, in the same order as they make other process groups.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
    """

    def __init__(self, group: Any = None) -> None:
        """
        Args:
            group: the process group; that of all processes by default. Its own messages stay apart.

        Raises:
            UserError: there is no process group yet, or its backend works on other memory than the host's.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise UserError('there is no process group: call torch.distributed.init_process_group("gloo") first')
        if (backend := dist.get_backend(group)) != "gloo":
            raise UserError(
                f"the process group has the backend {backend!r}, and gradients are exchanged in host memory; give one "
                'with torch.distributed.new_group(backend="gloo")'
            )
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def start_sum(self, array: Array) -> Request:
        """See `Communicator`."""
        tensor = torch.from_numpy(array)
        return _Work(_started(dist.all_reduce, tensor, group=self._group), tensor)

    def start_sum_to(self, array: Array, root: int) -> Request:
        """See `Communicator`."""
        tensor, target = torch.from_numpy(array), dist.get_global_rank(self._group, root)
        return _Work(_started(dist.reduce, tensor, target, group=self._group), tensor)

    def start_broadcast(self, array: Array, root: int) -> Request:
        """See `Communicator`."""
        tensor, source = torch.from_numpy(array), dist.get_global_rank(self._group, root)
        return _Work(_started(dist.broadcast, tensor, source, group=self._group), tensor)

    def wait(self, request: Request) -> None:
        """See `Communicator`."""
        if isinstance(request, _Work):
            request.wait()

    def gather(self, row: Array) -> Array:
        """See `Communicator`."""
        mine = torch.from_numpy(np.ascontiguousarray(row))
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        _Work(_started(dist.all_gather, rows, mine, group=self._group)).wait()
        return np.stack([one.numpy() for one in rows])

    def broadcast(self, array: Array, root: int) -> None:
        """See `Communicator`."""
        self.wait(self.start_broadcast(array, root))

    def without_lost(self) -> Communicator:
        """See `Communicator`. A process group cannot shrink."""
        raise RankLostError(
            "a rank is gone, and torch.distributed cannot go on without it: start the ranks again from a checkpoint, "
            "or use MPI with fault tolerance (mpirun --with-ft ulfm)"
        )


def _started(collective: Any, *arguments: Any, group: Any) -> Any:
    try:
        return collective(*arguments, group=group, async_op=True)
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: Exception) -> RankLostError:
    return RankLostError(f"a rank is gone: {error}")
