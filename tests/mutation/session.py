"""What has been judged: a cosmic-ray session, which `cr-report` and `cr-html` read too.

A mutant's job id names it as long as the text of its module stays as it is: a later run resumes,
and a change of one module has its mutants alone run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from .mutants import Mutant
from .runner import Verdict


class Session:
    """Verdicts by job id, kept in a database."""

    def __init__(self, database: WorkDB) -> None:
        self._database = database
        self._verdicts = {key: Verdict(**json.loads(r.output)) for key, r in database.results}

    def add(self, mutants: Mapping[str, Mutant]) -> None:
        """Puts mutants in by job id, as cosmic-ray's `init` does."""
        known = {key for (key,) in self._database_keys()}
        items = [WorkItem.single(key, _spec(m)) for key, m in mutants.items() if key not in known]
        self._database.add_work_items(items)

    def get(self, key: str) -> Verdict | None:
        return self._verdicts.get(key)

    def set(self, key: str, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        outcome = TestOutcome.KILLED if verdict.killed else TestOutcome.SURVIVED
        if verdict.how == "import":
            outcome = TestOutcome.INCOMPETENT
        output = json.dumps(asdict(verdict))
        self._database.set_result(key, WorkResult(WorkerOutcome.NORMAL, output, outcome))

    def _database_keys(self) -> Iterator[tuple[str]]:
        return iter((item.job_id,) for item in self._database.work_items)


@contextmanager
def open_session(path: Path) -> Iterator[Session]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with use_db(path) as database:
        yield Session(database)


def _spec(mutant: Mutant) -> MutationSpec:
    return MutationSpec(
        module_path=Path(mutant.file),
        operator_name=f"core/{mutant.operator}",
        occurrence=mutant.cosmic_occurrence,
        start_pos=mutant.start,
        end_pos=mutant.end,
    )
