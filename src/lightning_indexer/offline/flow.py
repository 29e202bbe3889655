"""The control flow of machine code: basic blocks, what is reachable, natural loops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .assembly import Instruction


@dataclass
class Block:
    """Instructions that run one after the other, and the blocks that may run next."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass
class Loop:
    """A natural loop: its blocks, those of them outside inner loops, and the loop around it."""

    header: int
    blocks: set[int]
    own: set[int] = field(default_factory=set)
    parent: Loop | None = None


@dataclass
class Flow:
    """Blocks by number (0 is the entry), those reachable from it, and the loops, outer first."""

    blocks: list[Block]
    reachable: list[int]
    loops: list[Loop]
    dominators: dict[int, set[int]]
    called: dict[str, int] = field(default_factory=dict)

    def loop_of(self, block: int) -> Loop | None:
        """The innermost loop that holds `block`."""
        return next((loop for loop in self.loops if block in loop.own), None)

    def reachable_from(self, start: int, without: Collection[int] = ()) -> set[int]:
        """Blocks that `start` leads to, itself included, on ways that avoid `without`."""
        reached: set[int] = set()
        waiting = [start]
        while waiting:
            number = waiting.pop()
            if number not in reached and number not in without:
                reached.add(number)
                waiting.extend(self.blocks[number].successors)
        return reached


def control_flow(instructions: Sequence[Instruction]) -> Flow:
    """Blocks, and natural loops: what reaches a back edge to a dominator without passing it.

    Back edges to one header make one loop.
    """
    blocks, labels = _blocks(instructions)
    predecessors, reachable = _predecessors(blocks)
    dominators = _dominators(predecessors, reachable)
    bodies: dict[int, set[int]] = {}
    for block in reachable:
        for header in blocks[block].successors:
            if header in dominators[block]:
                body = _reaching(block, header, predecessors)
                bodies[header] = bodies.get(header, set()) | body
    loops = [Loop(header, body) for header, body in bodies.items()]
    loops.sort(key=lambda loop: len(loop.blocks), reverse=True)
    for i, loop in enumerate(loops):
        around = [outer for outer in loops[:i] if loop.header in outer.blocks]
        loop.parent = around[-1] if around else None
        inside = [inner.blocks for inner in loops[i + 1 :] if inner.header in loop.blocks]
        loop.own = loop.blocks.difference(*inside)
    routines = {name for i in instructions if i.flow == "call" for name in i.targets}
    called = {name: _size(blocks, labels[name]) for name in routines}
    return Flow(blocks, reachable, loops, dominators, called)


def _blocks(instructions: Sequence[Instruction]) -> tuple[list[Block], dict[str, int]]:
    blocks, labels = [Block()], {}
    for instruction in instructions:
        if instruction.name == "":
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[instruction.targets[0]] = len(blocks) - 1
            continue
        blocks[-1].instructions.append(instruction)
        if instruction.flow in ("branch", "jump", "end"):
            blocks.append(Block())
    for i, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else Instruction("")
        if last.flow in ("branch", "jump"):
            if not last.targets:
                raise ValueError(f"the targets of a {last.name} are unknown")
            block.successors.extend(labels[target] for target in last.targets)
        if last.flow in ("next", "call", "branch") and i + 1 < len(blocks):
            block.successors.append(i + 1)
    return blocks, labels


def _predecessors(blocks: Sequence[Block]) -> tuple[dict[int, list[int]], list[int]]:
    reachable: dict[int, None] = {}
    waiting = [0]
    predecessors: dict[int, list[int]] = {0: []}
    while waiting:
        block = waiting.pop()
        if block in reachable:
            continue
        reachable[block] = None
        for successor in blocks[block].successors:
            predecessors.setdefault(successor, []).append(block)
            waiting.append(successor)
    return predecessors, sorted(reachable)


def _dominators(
    predecessors: dict[int, list[int]], reachable: Sequence[int]
) -> dict[int, set[int]]:
    dominators = {block: set(reachable) for block in reachable}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in reachable[1:]:
            common = set.intersection(*(dominators[p] for p in predecessors[block])) | {block}
            if common != dominators[block]:
                dominators[block], changed = common, True
    return dominators


def _reaching(block: int, header: int, predecessors: dict[int, list[int]]) -> set[int]:
    body, waiting = {header}, [block]
    while waiting:
        member = waiting.pop()
        if member not in body:
            body.add(member)
            waiting.extend(predecessors[member])
    return body


def _size(blocks: Sequence[Block], first: int) -> int:
    """Instructions of a called routine: all that is reachable from its first block."""
    body = Flow(list(blocks), [], [], {}).reachable_from(first)
    return sum(len(blocks[number].instructions) for number in body)
