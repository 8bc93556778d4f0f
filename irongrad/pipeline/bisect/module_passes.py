"""The first pass over IREE's module with which a compiled step disagrees with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def first_wrong(names: Sequence[str], holds: Callable[[tuple[str, ...]], bool]) -> str | None:
    """The first of `names`, in the order in which passes run, with which the numbers are wrong.

    A binary search over how many of the passes run. (Zeller, "Yesterday,
    my program worked. Today, it does not. Why?", ESEC/FSE 1999, searches for several causes.)

    Args:
        names: passes that can be left out, in order.
        holds: whether the numbers are right with some of `names` left out.

    Returns:
        The name; None if the numbers are wrong with all of `names` left out, too.
    """
    if not holds(tuple(names)):
        return None
    right, wrong = 0, len(names)  # the numbers are right with so many of them, and wrong with so many
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if holds(tuple(names[middle:])):
            right = middle
        else:
            wrong = middle
    return names[right]
