"""The loss of connectionist temporal classification, and its backward.

A. Graves et al., "Connectionist Temporal Classification" (ICML 2006): the S labels of a target, with blanks around and
between them, take 2 S + 1 places. alpha[t, s] is the probability of all paths that are at place s at time t. beta[t, s]
is the probability of all paths from there to the end. Both are computed as logarithms. If the lengths are tensors,
shapes follow the longest target that fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from irongrad.operators.decompositions.registry import decomposes

aten = torch.ops.aten
Lengths: TypeAlias = torch.Tensor | Sequence[int]


@dataclass(frozen=True)
class _Lattice:
    """The data of both recursions.

    Attributes:
        emitted: the log probability of the label at each place, [time, batch, place].
        labels: the label at each place, [batch, place].
        skips: whether a path may reach a place directly from two places before, [batch, place].
        times: the input lengths, [batch, 1].
        ends: the last place of each target, [batch, 1].
    """

    emitted: torch.Tensor
    labels: torch.Tensor
    skips: torch.Tensor
    times: torch.Tensor
    ends: torch.Tensor


def longest_target(targets: torch.Tensor, lengths: Lengths) -> int:
    """The length of the longest target, or an upper bound of it if `lengths` is a tensor."""
    if isinstance(lengths, torch.Tensor):
        return int(targets.shape[-1])
    return max(lengths, default=0)


def _lattice(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Lengths, target_lengths: Lengths, blank: int
) -> _Lattice:
    """Build the places of every target, with the log probabilities of their labels (Graves et al., section 4.1).

    Label l of S becomes place 2 l + 1 of 2 S + 1, and blanks take the even places. A path may skip the blank between
    two labels that differ (equation 6).
    """
    longest = longest_target(targets, target_lengths)
    lengths = torch.as_tensor(target_lengths, dtype=torch.int64)
    batch = log_probs.shape[1]
    if targets.ndim == 1:  # concatenated targets
        starts = lengths.cumsum(0) - lengths
        index = (starts.unsqueeze(1) + torch.arange(longest)).clamp(max=max(targets.shape[0] - 1, 0))
        targets = targets[index] if targets.shape[0] else targets.new_zeros((batch, longest))
    targets = targets[:, :longest].to(torch.int64)
    blanks = torch.full_like(targets, blank)
    between = torch.stack([blanks, targets], 2).reshape(batch, 2 * longest)
    labels = torch.cat([between, torch.full((batch, 1), blank, dtype=torch.int64)], 1)
    # Padding may hold any value, but the gather needs valid labels.
    labels = labels.clamp(0, log_probs.shape[2] - 1)
    before = torch.cat([torch.full((batch, 2), blank, dtype=torch.int64), labels], 1)[:, : labels.shape[1]]
    emitted = log_probs.gather(2, labels.unsqueeze(0).expand(log_probs.shape[0], -1, -1))
    times = torch.as_tensor(input_lengths, dtype=torch.int64)
    skips = (labels != blank) & (labels != before)
    return _Lattice(emitted, labels, skips, times.unsqueeze(1), 2 * lengths.unsqueeze(1))


@decomposes(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative log likelihood, [batch], and alpha, [batch, time, place]."""
    lattice = _lattice(log_probs, targets, input_lengths, target_lengths, blank)
    alpha = _forward(lattice)
    last = (lattice.times - 1).clamp(min=0).unsqueeze(0).expand(1, -1, alpha.shape[2])
    final = torch.where(_is_end(lattice), alpha.gather(0, last).squeeze(0), -math.inf)
    # For an input of length zero, the empty target has probability 1 and any other target has probability 0.
    empty = torch.where(lattice.ends == 0, 0.0, final.new_full((), -math.inf)).squeeze(1)
    return -torch.where(lattice.times.squeeze(1) == 0, empty, final.logsumexp(1)), alpha.transpose(0, 1)


@decomposes(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def _ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The gradient of the input of the log_softmax (equation 16).

    ATen, too, passes this gradient to the log_softmax that comes before the loss.
    """
    lattice = _lattice(log_probs, targets, input_lengths, target_lengths, blank)
    alpha, loss = log_alpha.transpose(0, 1), neg_log_likelihood.unsqueeze(1)
    ways = torch.where(lattice.emitted == -math.inf, -math.inf, alpha + _backward(lattice) - lattice.emitted)
    posterior = (ways + loss).exp().transpose(0, 1)  # [batch, time, place]
    # A sum instead of a matrix product: IREE 3.13.0 crashes while it packs a mask operand for data tiling.
    is_label = (lattice.labels.unsqueeze(2) == torch.arange(log_probs.shape[2])).unsqueeze(1)
    expected = (posterior.unsqueeze(3) * is_label.to(posterior.dtype)).sum(2).transpose(0, 1)
    within = torch.arange(log_probs.shape[0]).reshape(-1, 1, 1) < lattice.times
    if zero_infinity:
        within = within & (loss != math.inf)
    return torch.where(within, (log_probs.exp() - expected) * grad.unsqueeze(1), 0.0)


def _forward(lattice: _Lattice) -> torch.Tensor:
    """The logarithm of alpha, [time, batch, place]."""
    places = torch.arange(lattice.emitted.shape[2])
    first = torch.where(places < 2, lattice.emitted[0], -math.inf)

    def step(alpha: torch.Tensor, emitted: torch.Tensor, skips: torch.Tensor) -> list[torch.Tensor]:
        skipped = torch.where(skips, _shifted(alpha, 2), -math.inf)
        alpha = _log_sum(alpha, _shifted(alpha, 1), skipped) + emitted
        return [alpha, alpha]

    return torch.cat([first.unsqueeze(0), _scan(step, first, [lattice.emitted[1:]], lattice.skips)])


def _backward(lattice: _Lattice) -> torch.Tensor:
    """The logarithm of beta, [time, batch, place]; -inf after the end of an input."""
    impossible = torch.full_like(lattice.emitted[0], -math.inf)
    end = torch.where(_is_end(lattice), 0.0, impossible)
    is_last = torch.arange(1, lattice.emitted.shape[0] + 1).reshape(-1, 1, 1) == lattice.times

    def step(
        beta: torch.Tensor, emitted: torch.Tensor, is_last: torch.Tensor, end: torch.Tensor, skips: torch.Tensor
    ) -> list[torch.Tensor]:
        skipped = _shifted(torch.where(skips, beta, -math.inf), -2)
        beta = torch.where(is_last, end, _log_sum(beta, _shifted(beta, -1), skipped)) + emitted
        return [beta, beta]

    sequences = [lattice.emitted.flip(0), is_last.flip(0)]
    return _scan(step, impossible, sequences, end, lattice.skips).flip(0)


def _scan(
    step: Callable[..., list[torch.Tensor]],
    first: torch.Tensor,
    sequences: list[torch.Tensor],
    *constants: torch.Tensor,
) -> torch.Tensor:
    """Stack the results of every step of a recursion over time.

    The compiled program has one loop, however long the input is.
    """
    if sequences[0].shape[0] == 0:
        return first.new_empty((0, *first.shape))
    result: list[torch.Tensor] = torch.ops.higher_order.scan(step, [first], sequences, constants)
    return result[1]


def _is_end(lattice: _Lattice) -> torch.Tensor:
    """Whether a path may end at a place: the last label, or the blank after it."""
    places = torch.arange(lattice.labels.shape[1])
    return (places == lattice.ends) | (places == lattice.ends - 1)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x[:, place - by], with -inf from outside of `x`."""
    return torch.nn.functional.pad(x, (by, 0) if by > 0 else (0, -by), value=-math.inf).narrow(
        1, max(-by, 0), x.shape[1]
    )


def _log_sum(*terms: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b) + ...); all terms may be -inf."""
    largest = functools.reduce(torch.maximum, terms)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    total = functools.reduce(torch.add, [(t - shift).exp() for t in terms])
    return total.log() + shift
