"""Runs the kit on a peer: all it promises, then one promise more at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from lightning_indexer.testing.conformance import properties, run_property
from lightning_indexer.testing.contracts import KernelContract
from lightning_indexer.testing.report import Failure

from .peer import Peer


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a contract fared.

    Attributes:
        promise: what was asked, in words; "" for the peer's own contract.
        properties, cases: how many were tried.
        failed: names of the properties that do not hold.
        reason, case: the smallest case on which one of them does not, and what came instead.
    """

    promise: str
    properties: int
    cases: int
    failed: tuple[str, ...]
    reason: str
    case: str

    @property
    def holds(self) -> bool:
        """Whether nothing failed."""
        return not self.failed


@dataclasses.dataclass(frozen=True)
class Judgement:
    """All verdicts on a peer."""

    peer: Peer
    version: str
    own: Verdict
    probes: tuple[Verdict, ...]
    seconds: float

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "peer": self.peer.name,
            "package": self.peer.package,
            "version": self.version,
            "source": self.peer.source,
            "promises": self.peer.promises,
            "op": self.peer.op,
            "contract": repr(self.peer.contract),
            "own": dataclasses.asdict(self.own),
            "probes": [dataclasses.asdict(verdict) for verdict in self.probes],
            "seconds": round(self.seconds, 1),
        }


def judge(peer: Peer, examples: int) -> Judgement:
    """Everything the peer's own contract asks, and what each probe is about."""
    start, fn = time.monotonic(), peer.load()
    own = _verdict("", peer.op, fn, peer.contract, (), examples)
    probes = tuple(
        _verdict(p.promise, peer.op, fn, p.contract, p.about, examples) for p in peer.probes
    )
    return Judgement(peer, peer.version or "", own, probes, time.monotonic() - start)


def _verdict(
    promise: str,
    op: str,
    fn: Callable[..., Any],
    contract: KernelContract,
    about: tuple[str, ...],
    examples: int,
) -> Verdict:
    asked = properties(op, fn, contract)
    asked = [p for p in asked if not about or any(words in p.name for words in about)]
    if not asked:
        raise ValueError(f"no property of {op} is about {about}")
    outcomes = [run_property(prop, examples) for prop in asked]
    found = {o.name: o.failure for o in outcomes if o.failure}
    least = min(found.values(), key=_size, default=None)
    return Verdict(
        promise,
        len(outcomes),
        sum(o.cases for o in outcomes),
        tuple(found),
        least.reason if least else "",
        repr(least.case) if least else "",
    )


def _size(failure: Failure) -> int:
    """The sizes in a case, added up; its seed is none."""
    case = failure.case
    fields = dataclasses.fields(case) if dataclasses.is_dataclass(case) else ()
    values = [getattr(case, f.name) for f in fields if f.name != "seed"]
    flat = [x for v in values for x in (v if isinstance(v, tuple) else (v,))]
    return sum(x for x in flat if isinstance(x, int))
