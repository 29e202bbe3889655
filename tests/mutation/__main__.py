"""Runs mutants of the three folders and reports which of them no test rejects.

    PYTHONPATH=tests python -m mutation [--sample N --seed S] [--only FILE …] [--jobs N]

Exit code 0: at least 90 % are killed, every survivor is explained, and the tests that kill pass
without any mutant; else 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Collection
from pathlib import Path

from sins.judge import copied_tree
from sins.sin import ROOT

from .calls import make_map, read_calls, write_killers
from .explain import explain, read_explanations
from .mutants import Mutant, files, mutants_of
from .record import recorded
from .report import Result, report
from .runner import Runner, Verdict, run_all
from .session import Session, open_session

SESSION = ROOT / "build" / "mutation.sqlite"


def main() -> int:
    """Runs the command line; returns its exit code."""
    args = _arguments()
    if args.map:
        return make_map(ROOT, args.tests)
    with copied_tree() as tree:  # the tree may change while this runs
        texts = {file: (tree / file).read_text() for file in files(tree)}
        unknown = set(args.only) - texts.keys()
        if unknown:
            sys.exit(f"no such module: {', '.join(sorted(unknown))}")
        every = [m for file, text in texts.items() for m in mutants_of(file, text)]
        explained = explain(every, read_explanations(), texts)
        mutants = _chosen(every, args)
        session_file = SESSION if not args.sample else tree / "sample.sqlite"
        with open_session(session_file) as session:
            keys = {mutant: mutant.key(texts[mutant.file]) for mutant in mutants}
            session.add({key: mutant for mutant, key in keys.items()})
            if not (args.anew or args.sample):
                for mutant, verdict in recorded(mutants, texts):
                    if session.get(keys[mutant]) is None:
                        session.set(keys[mutant], verdict)
            runner = Runner(tree, read_calls(tree), args.patience)
            try:
                _judge(runner, session, keys, explained, args)
                verdicts = {m: v for m, key in keys.items() if (v := session.get(key))}
                guilty = runner.innocent(verdicts.values()) if args.innocents else set()
                if mutants == [m for m in every if not m.dropped]:
                    kills = [(m, v.backend, v.by, v.seconds) for m, v in verdicts.items()]
                    kept = {m.file for m, v in verdicts.items() if v.commit}
                    write_killers(runner.calls, [k for k in kills if "/" in k[2]], kept)
            finally:
                runner.close()
    result = Result(every, verdicts, explained, texts)
    if args.json:
        result.write(args.json)
    return report(result, guilty, runner.missing, args.list_survivors)


def _chosen(every: list[Mutant], args: argparse.Namespace) -> list[Mutant]:
    mutants = [m for m in every if not m.dropped]
    if args.only:
        mutants = [m for file in args.only for m in mutants if m.file == file]
    if args.sample:
        mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
    return mutants


def _judge(
    runner: Runner,
    session: Session,
    keys: dict[Mutant, str],
    explained: Collection[Mutant],
    args: argparse.Namespace,
) -> None:
    """Runs what has no verdict yet, or has survived and shall be tried again.

    What is explained meets the quick tests alone: it is not expected to be killed.
    """

    def is_open(mutant: Mutant) -> bool:
        verdict = session.get(keys[mutant])
        if verdict is None:
            return True
        again = args.retry_survivors or (args.patience > 0 and verdict.brief)
        return again and not verdict.killed and mutant not in explained

    left = [mutant for mutant in keys if is_open(mutant)]
    start, count = time.monotonic(), 0

    def done(mutant: Mutant, verdict: Verdict) -> None:
        nonlocal count
        session.set(keys[mutant], verdict)
        count += 1
        rest = (time.monotonic() - start) / count * (len(left) - count) / 60
        what = f"{verdict.seconds:5.1f} s  {verdict.how:9} {mutant.place}  {verdict.by}"
        print(f"{count}/{len(left)} ({rest:.0f} min left) {what}", file=sys.stderr, flush=True)

    survived = {m for m in left if session.get(keys[m])}
    run_all(
        lambda m: runner.judge(
            m, quick=m not in survived, long=args.patience > 0 and m not in explained
        ),
        *(left, args.jobs, done),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="these modules alone")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many, drawn anew")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--map", action="store_true", help="write calls.json anew, and end")
    parser.add_argument("tests", nargs="*", metavar="TEST_FILE", help="with --map: these alone")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="how many times more tests survivors get; 0: only the quick ones that all get",
    )
    parser.add_argument("--anew", action="store_true", help="take no verdict from results.jsonl")
    parser.add_argument("--retry-survivors", action="store_true", help="run them again")
    parser.add_argument("--list-survivors", action="store_true", help="print each with its change")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    parser.add_argument(
        "--no-innocents",
        dest="innocents",
        action="store_false",
        help="do not check that the tests that kill pass without any mutant",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
