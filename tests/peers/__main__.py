"""Runs the test kit on the peers that are installed.

    PYTHONPATH=tests python -m peers [--only NAME …] [--json FILE] [--markdown FILE]

Peers with Triton kernels need TRITON_INTERPRET=1 and CUDA_VISIBLE_DEVICES= where there is no GPU.
Exit code 0: every peer that ran keeps its own promises; 1: some do not; 2: none could be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from importlib import metadata
from pathlib import Path

from lightning_indexer.kernels.backend import INTERPRET

from .families import PEERS
from .judge import Judgement, judge
from .peer import Peer
from .table import markdown, write


def main() -> int:
    """Runs the command line; returns its exit code."""
    args = _arguments()
    chosen = [p for p in PEERS if not args.only or p.name in args.only]
    unknown = set(args.only) - {p.name for p in chosen}
    if unknown:
        sys.exit(f"no such peer: {', '.join(sorted(unknown))}")
    judgements = []
    for peer in chosen:
        hindrance = why_not(peer)
        if hindrance:
            print(f"{peer.name}: not run, {hindrance}", flush=True)
            continue
        judgements.append(judge(peer, args.examples))
        _announce(judgements[-1])
    if args.json:
        rows = [j.row() for j in judgements]
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    if args.markdown:
        write(args.markdown, markdown(judgements, _head(args.examples)))
    if not judgements:
        return 2
    return int(any(not j.own.holds for j in judgements))


def why_not(peer: Peer) -> str:
    """What keeps a peer from running here; "" if nothing does."""
    if peer.version is None:
        return f"{peer.package} is not installed"
    if peer.triton and not INTERPRET:
        return "it needs TRITON_INTERPRET=1"
    return ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these peers alone")
    parser.add_argument("--examples", type=int, default=25, help="cases a property (default 25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write tables there, or between its markers"
    )
    return parser.parse_args()


def _announce(judgement: Judgement) -> None:
    own = judgement.own
    state = "keeps its promises" if own.holds else f"fails: {', '.join(own.failed)}"
    print(
        f"{judgement.peer.name} {judgement.version}: {state},"
        f" {own.cases} cases, {judgement.seconds:.0f} s",
        flush=True,
    )
    if not own.holds:
        print(f"    {own.reason}\n    {own.case}")
    for probe in judgement.probes:
        print(f"    {probe.promise}: {'held' if probe.holds else probe.reason.splitlines()[0]}")
        if probe.case:
            print(f"        {probe.case}")


def _head(examples: int) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton"))
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"Run on {today} on a CPU with {versions}, {examples} cases a property."


if __name__ == "__main__":
    sys.exit(main())
