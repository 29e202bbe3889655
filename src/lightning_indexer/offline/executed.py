"""Which blocks of the machine code a launch does not execute, by what its case says."""

from __future__ import annotations

from collections.abc import Sequence

from .flow import Flow
from .places import Place
from .source import scopes


def skipped_blocks(flow: Flow, places: Sequence[Place]) -> set[int]:
    """Blocks most of whose instructions lie in `places`, and those that only they lead to or from.

    Compilers move instructions from block to block and give a join the line of one of its sides.
    So where an executed block leads into skipped ones alone, either it is the beginning of the
    skipped part (it dominates what follows), or what follows is a join, and executed.

    Raises:
        ValueError: no way through the kernel is left.
    """
    if not places:
        return set()
    inside = {number: _share_inside(flow, number, places) for number in flow.reachable}
    skipped = {number for number, share in inside.items() if share >= 0.5}
    settled: set[int] = set()  # each block changes its mind once
    while stuck := _stuck(flow, skipped, settled):
        settled.add(stuck)
        joins = _joins(flow, stuck)
        skipped = skipped - joins if joins else skipped | {stuck}
    ahead = flow.reachable_from(0, without=skipped)
    if not any(not flow.blocks[number].successors for number in ahead):
        names = ", ".join(place.name for place in places)
        raise ValueError(f"nothing is left of the kernel without {names}")
    return set(flow.reachable) - ahead


def _stuck(flow: Flow, skipped: set[int], settled: set[int]) -> int:
    """An executed block that leads into skipped ones alone; 0, which never is one, if none does."""
    for number in sorted(flow.reachable_from(0, without=skipped) - settled):
        successors = flow.blocks[number].successors
        if number and successors and skipped.issuperset(successors):
            return number
    return 0


def _share_inside(flow: Flow, number: int, places: Sequence[Place]) -> float:
    paths = [scopes(i.chain) for i in flow.blocks[number].instructions if i.chain]
    return sum(any(p.holds(path) for p in places) for path in paths) / max(len(paths), 1)


def _joins(flow: Flow, number: int) -> set[int]:
    """Successors of a block at which other ways arrive too."""
    successors = set(flow.blocks[number].successors)
    return {
        successor
        for successor in successors
        if number not in flow.dominators[successor]
        or any(
            successor in flow.reachable_from(other, without={number})
            for other in successors - {successor}
        )
    }
