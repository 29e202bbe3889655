"""How `topk_indices` is launched: sizes, and one program a row or several. Plain Python.

No choice here changes an index: the rule is exact, so a plan is a matter of time and memory only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .backend import Target, triton

#: Scores a row may have to be selected from in registers as they are; longer rows go by flags.
SHORT = 4096
#: Longer rows than this have more candidates listed, from a sample that is thinner.
LONG = 1 << 18
#: Candidates, or scores of a short row, that a thread holds: 32 cost too many registers below.
THREAD_KEYS = 16
#: Rows of one launch, which share no scratch: enough of them for the device, and this many bytes.
ROWS_PER_MULTIPROCESSOR = 8
SCRATCH_BYTES = 1 << 26
#: Values of a digit, when digits are counted.
DIGITS = 2048
#: Rows at least this long are split if there are too few of them to fill the device.
SPLIT_LENGTH = 1 << 15


@dataclass(frozen=True)
class TopkPlan:
    """The launch of one call.

    capacity: scores or candidates that a program compares in registers, a power of two.
    samples: scores looked at to guess a threshold, at most capacity.
    threads: threads of a program; a tile is 32 scores for each.
    pop_words: words whose flags are listed at a time.
    launch_rows: rows of one launch; the next launch uses the same scratch.
    splits: programs a row; more than 1 means three launches (sample, flags, finish).
    histogram: digits are counted by `tl.histogram`, else by atomic additions (on CDNA3 the former
        costs 83 to 92 instructions a score).
    """

    capacity: int
    samples: int
    threads: int
    pop_words: int
    launch_rows: int
    splits: int
    histogram: bool

    @property
    def tile(self) -> int:
        """Scores that a program flags at a time."""
        return 32 * self.threads

    def scratch(self, length: int) -> tuple[int, int]:
        """(words, ints): a row's words of one kind, and all of a program's scratch as int32.

        The list; an int that is never used, so that words are not loaded several a thread (each
        store of a popped position would then wait for other threads); words of two kinds; counts.
        """
        if not self.samples:
            return 0, 0
        words = triton.cdiv(length, self.tile) * self.threads
        counts = 0 if self.histogram else DIGITS
        return words, triton.cdiv(1 + 2 * words + self.capacity + counts, 16) * 16


@lru_cache(maxsize=4096)  # rows and lengths vary from call to call
def plan_topk(target: Target, multiprocessors: int, rows: int, length: int) -> TopkPlan:
    """The plan for [rows, length] scores. k plays no part: large ones are found between bounds."""
    histogram = target.backend != "hip"
    warp = 32 if histogram else 64
    if length <= SHORT:
        capacity = max(triton.next_power_of_2(length), 128)
        threads = max(capacity // THREAD_KEYS, warp)
        return TopkPlan(capacity, 0, threads, 0, rows, 1, histogram)
    capacity = SHORT if length <= LONG else 2 * SHORT
    threads = capacity // THREAD_KEYS
    splits = 1
    if length >= SPLIT_LENGTH and 2 * rows <= multiprocessors:
        splits = min(2 * multiprocessors // rows, length // (64 * threads))
    plan = TopkPlan(
        capacity=capacity,
        samples=4096 if length > LONG // 3 else 2048,
        threads=threads,
        pop_words=1024,
        launch_rows=rows,
        splits=splits,
        histogram=histogram,
    )
    most = max(
        ROWS_PER_MULTIPROCESSOR * multiprocessors, SCRATCH_BYTES // plan.scratch(length)[1] // 4
    )
    return replace(plan, launch_rows=min(rows, most)) if splits == 1 else plan
