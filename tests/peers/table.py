"""Judgements as Markdown: what each peer promises, then where a stricter reading breaks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .judge import Judgement, Verdict

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def markdown(judgements: Sequence[Judgement], head: str) -> str:
    """`head`, a table of the peers' own promises, and one of promises they do not make."""
    lines = [
        head,
        "",
        "### What each promises",
        "| peer | promises | from | cases | verdict |",
        "|---|---|---|---|---|",
    ]
    for j in judgements:
        lines.append(
            _line(
                f"`{j.peer.name}`",
                j.peer.promises,
                f"{j.peer.package} {j.version}: {j.peer.source}",
                f"{j.own.cases:,}",
                _own(j.own),
            )
        )
    lines += [
        "",
        "### Promises of ours that they do not make",
        "| peer | promise | verdict | smallest failing case |",
        "|---|---|---|---|",
    ]
    for j in judgements:
        for probe in j.probes:
            name = f"`{j.peer.name}`"
            if probe.holds:
                lines.append(_line(name, probe.promise, f"held in {probe.cases} cases", ""))
            else:
                lines.append(_line(name, probe.promise, _flat(probe.reason), f"`{probe.case}`"))
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Between the markers of a file that has them; else `text` is the file."""
    old = path.read_text() if path.exists() else ""
    if BEGIN not in old:
        path.write_text(text)
        return
    between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    path.write_text(between.sub(lambda _: f"{BEGIN}\n{text}{END}", old))


def _own(verdict: Verdict) -> str:
    if verdict.holds:
        return f"all {verdict.properties} properties hold"
    failed = f"{len(verdict.failed)} of {verdict.properties} properties fail"
    return f"{failed}; {verdict.failed[0]}: {_flat(verdict.reason)}; `{verdict.case}`"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
