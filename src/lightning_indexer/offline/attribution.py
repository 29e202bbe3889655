"""Which loop of the source a machine loop is, and how many of its iterations one turn makes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .assembly import Instruction
from .flow import Block, Flow, Loop, control_flow
from .source import Scope, Scopes, scopes

#: The most instructions of a loop that compilers made on their own. It counts once.
MAX_ROUND = 16

#: How many instructions there are by the source line they come from and their name.
Body = Counter[tuple[object, str]]


@dataclass(frozen=True)
class Attribution:
    """Machine code and the source loops it belongs to.

    `loops` has the scopes down to the source loop of each machine loop, by its header; () for
    compilers' own, None for a loop that is in no source loop but those around it. `bodies` has,
    for each block, what it holds of the work of source loops: the instructions of each outside
    inner loops and outside its condition.
    """

    flow: Flow
    loops: dict[int, Scopes | None]
    bodies: dict[int, dict[Scopes, Body]]

    def body(self, loop: Loop, path: Scopes) -> Body:
        """What the blocks of a machine loop hold of a source loop's work."""
        total: Body = Counter()
        for number in loop.own:
            total.update(self.bodies[number].get(path, {}))
        return total

    def smallest_bodies(self) -> dict[Scopes, Body]:
        """The smallest machine loop's work for each source loop: one iteration, if not unrolled."""
        found: dict[Scopes, Body] = {}
        for loop in self.flow.loops:
            if path := self.loops[loop.header]:
                body = self.body(loop, path)
                if path not in found or sum(body.values()) < sum(found[path].values()):
                    found[path] = body
        return found


def attribute(instructions: Sequence[Instruction]) -> Attribution:
    """Finds the source loop of each machine loop.

    A jump back from a loop's condition tells which it is. Where compilers have moved that, the
    loops that its instructions lie in do, those in inner machine loops left out.
    """
    flow = control_flow(instructions)
    found: dict[int, Scopes | None] = {}
    for loop in flow.loops:  # the outer ones come first
        around = (loop.parent and found[loop.parent.header]) or ()
        own = [i for number in sorted(loop.own) for i in flow.blocks[number].instructions]
        path: Scopes | None = ()
        if not _compilers_own(own):
            path = _by_condition(flow, loop) or _by_share(own, around)
            if not path and len(own) > MAX_ROUND:
                path = None
        found[loop.header] = path
    bodies = {number: _bodies(flow.blocks[number]) for number in flow.reachable}
    return Attribution(flow, found, bodies)


def _compilers_own(own: Sequence[Instruction]) -> bool:
    """Whether a loop waits for a barrier, or (AMD) goes through a wave's distinct addresses."""
    names = [i.name for i in own]
    polls = any("TRYWAIT" in name for name in names)
    waterfall = "s_cbranch_execnz" in names and "v_readfirstlane_b32" in names
    return len(own) <= MAX_ROUND and (polls or waterfall)


def _by_condition(flow: Flow, loop: Loop) -> Scopes:
    for number in sorted(loop.blocks):
        block = flow.blocks[number]
        if loop.header in block.successors and block.instructions:
            last = block.instructions[-1]
            path = _innermost_loop(scopes(last.chain))
            if path and _in_header(path[-1], last):
                return path
    return ()


def _in_header(loop: Scope, instruction: Instruction) -> bool:
    return loop.first <= instruction.chain[-1].number <= loop.last


def _by_share(own: Sequence[Instruction], around: Scopes) -> Scopes:
    """The outermost source loop, inside those around, that an eighth of the instructions lie in.

    Where a loop in it has been unrolled or has but one trip, most of them may lie in that one;
    compilers move code out of loops, not into them.
    """
    votes = Counter(_innermost_loop(scopes(i.chain)) for i in own)
    inside = {path: n for path, n in votes.items() if len(path) > len(around)}
    inside = {path: n for path, n in inside.items() if path[: len(around)] == around}
    enough = min(len(own) / 8, max(inside.values(), default=0))
    return min((path for path, n in inside.items() if n >= enough), key=len, default=())


def _innermost_loop(path: Scopes) -> Scopes:
    """The scopes down to the innermost loop; () outside of any."""
    for end in range(len(path), 0, -1):
        if path[end - 1].kind == "loop":
            return path[:end]
    return ()


def _bodies(block: Block) -> dict[Scopes, Body]:
    found: dict[Scopes, Body] = defaultdict(Counter)
    for i in block.instructions:
        here = scopes(i.chain)
        path = _innermost_loop(here)
        if path and not (here == path and _in_header(path[-1], i)):
            found[path][i.chain, i.name.split(".")[0]] += 1
    return dict(found)


def copies(body: Body, one: Body) -> int:
    """How often the instructions of one iteration occur in `body`: the median of their ratios."""
    ratios = sorted(body[key] / count for key, count in one.items() for _ in range(count))
    return round(ratios[len(ratios) // 2]) if ratios else 0
