"""Machine instructions that one program executes, by the loops and branches a case describes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .attribution import Attribution, Body, copies
from .case import Work
from .executed import skipped_blocks
from .flow import Block, Flow, Loop
from .places import loop_place, skipped_place, trips_of
from .source import Scopes

#: Routines that compilers call for rare operands, or to stop a broken program.
_RARE = ("slowpath", "trap")


@dataclass(frozen=True)
class Count:
    """Instructions a thread of one program issues, in all and in loops; lines never reached."""

    instructions: float
    in_loops: float
    fallback: int


def count(code: Attribution, work: Work, iterations: Mapping[Scopes, Body] | None = None) -> Count:
    """Weighs each line by the iterations of the loops around it; skipped blocks weigh nothing.

    `iterations` holds what one iteration of a source loop is, from code that is not unrolled. By
    default it is the smallest machine loop of each.

    Raises:
        ValueError: a loop has no trips, or `skipped` leaves no way through the kernel.
    """
    flow = code.flow
    skipped = skipped_blocks(flow, [skipped_place(name) for name in work.skipped])
    if iterations is None:
        iterations = code.smallest_bodies()
    weights = _weights(code, skipped, work, iterations)
    total = in_loops = 0.0
    fallback = 0
    for number in flow.reachable:
        lines, rare = _lines(flow, flow.blocks[number])
        fallback += rare
        if number in skipped:
            fallback += lines
            continue
        total += lines * weights[number]
        if flow.loop_of(number) is not None:
            in_loops += lines * weights[number]
    return Count(total, in_loops, fallback)


def _lines(flow: Flow, block: Block) -> tuple[int, int]:
    """Instructions of a block with the routines it calls, and those of routines seldom called."""
    lines, rare = len(block.instructions), 0
    for instruction in block.instructions:
        if instruction.flow == "call":
            routine = instruction.targets[0]
            size = flow.called[routine]
            if any(word in routine for word in _RARE):
                rare += size
            else:
                lines += size
    return lines, rare


def _weights(
    code: Attribution, skipped: Collection[int], work: Work, iterations: Mapping[Scopes, Body]
) -> dict[int, float]:
    """How often a program executes each block that is not skipped."""
    trips = {loop_place(name): value for name, value in work.trips.items()}
    groups: dict[tuple[Scopes, int | None], list[Loop]] = defaultdict(list)
    for loop in code.flow.loops:
        path = code.loops[loop.header]
        if loop.header in skipped:
            continue
        if path is None:
            first = code.flow.blocks[loop.header].instructions[0]
            raise ValueError(f"a machine loop is in no source loop, near {first.chain[-1:]}")
        if path:
            groups[path, loop.parent.header if loop.parent else None].append(loop)
    weights = dict.fromkeys(code.flow.reachable, 1.0)
    turns: dict[int, float] = {}
    for (path, _), loops in groups.items():
        one = iterations.get(path) or Counter()
        beside = [
            number
            for number in code.flow.reachable
            if path in code.bodies[number]
            and number not in skipped
            and code.flow.loop_of(number) is loops[0].parent
        ]
        _share(code, path, one, trips_of(path, trips), loops, beside, turns, weights)
    for loop in code.flow.loops:
        for number in loop.blocks:
            weights[number] *= turns.get(loop.header, 1.0)  # compilers' own count once
    return weights


def _share(
    code: Attribution,
    path: Scopes,
    one: Body,
    trips: float,
    loops: Sequence[Loop],
    beside: Sequence[int],
    turns: dict[int, float],
    weights: dict[int, float],
) -> None:
    """Shares a source loop's trips among its machine loops: unrolled ones, then remainders.

    Whole copies of an iteration in straight code `beside` the loops are remainders too. Loops with
    equally many copies are not shared among: each is entered, as where the loop around them is
    unrolled.
    """
    by_copies: dict[int, list[Loop]] = defaultdict(list)
    for loop in loops:
        by_copies[max(copies(code.body(loop, path), one), 1)].append(loop)
    straight: dict[int, list[int]] = defaultdict(list)
    for number in beside:
        if factor := copies(code.bodies[number][path], one):
            straight[factor].append(number)
    left, smallest = trips, min(by_copies)
    for factor in sorted({*by_copies, *straight}, reverse=True):
        if factor in by_copies:
            entered = left / factor if factor == smallest else left // factor
            turns.update((loop.header, entered) for loop in by_copies[factor])
            left -= entered * factor
        if factor in straight:
            once = 1.0 if left >= factor else 0.0
            weights.update((number, once) for number in straight[factor])
            left -= once * factor
