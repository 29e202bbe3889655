"""The command line: the demo model, its training, and the report on compiled kernels."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from . import terminal
from .kernels.backend import HAS_TRITON
from .tinylm import checkpoint
from .tinylm.config import TinyConfig
from .tinylm.corpus import python_topics
from .tinylm.demo import MODES, Job, Mode, ModeResult, measure_overlap, run_mode
from .tinylm.sharing_check import build_for_check, check_sharing
from .tinylm.training import TrainingPlan, train

DEFAULT_PROMPTS = (
    "The for statement is used to",
    "A class definition is an executable",
    "When the interpreter finds an error",
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Sparse-attention indexer: speculative decoding with a shared top-k selection.",
    pretty_exceptions_show_locals=False,
)


class ModeChoice(str, Enum):
    """A single mode, or all of them side by side."""

    greedy = "greedy"
    fresh = "fresh"
    shared = "shared"
    compare = "compare"


class GraphChoice(str, Enum):
    """How the draft's steps are executed."""

    eager = "eager"
    recorded = "recorded"


@app.command()
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 file to continue; - waits for standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Bytes to generate for each prompt.")] = 48,
    draft_tokens: Annotated[int, typer.Option(help="K, drafts a round.", min=0, max=16)] = 3,
    mode: Annotated[
        ModeChoice, typer.Option(help="Plain, fresh or shared selections, or all three.")
    ] = ModeChoice.compare,
    graph: Annotated[
        GraphChoice, typer.Option(help="Run draft steps eagerly, or replay recorded ones.")
    ] = GraphChoice.eager,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Generate text with the demo model and compare draft selections.

    Prompts come from --prompt, --prompt-file or what is piped in; without any, three defaults run.
    """
    torch.set_num_threads(1)  # matrices this small only make threads wait for each other
    lm, card = checkpoint.load()
    prompts = _prompts(prompt, prompt_file)
    job = Job(
        prompts=[text.encode() for text in prompts],
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        graph=graph.value,
    )
    try:
        job.check(lm.config.max_model_len)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    console = Console()
    modes: dict[str, ModeResult] = {}
    chosen: Sequence[Mode] = MODES if mode is ModeChoice.compare else (mode.value,)
    for name in chosen:
        if modes:  # the text is on the screen already
            with console.status(f"again, {name}"):
                modes[name] = run_mode(lm, name, job)
        else:
            with terminal.streamed_texts(console, prompts) as on_tokens:
                modes[name] = run_mode(lm, name, job, on_tokens=on_tokens)
    overlap = None
    if "shared" in modes:
        with console.status("measuring the overlap of selections"):
            overlap = measure_overlap(lm, job)
    console.print(terminal.comparison_table(card, modes, overlap))

    texts = [result.tokens for result in modes.values()]
    identical = all(tokens == texts[0] for tokens in texts)
    if len(modes) > 1:
        console.print("all texts identical" if identical else "[red]texts differ[/red]")
    if json_file is not None:
        report = _report(card, prompts, job, identical, modes, overlap)
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if not identical:
        raise typer.Exit(1)


@app.command(name="train")
def train_command(
    out: Annotated[Path, typer.Option(help="Directory for weights and model card.")] = Path(
        "tinylm-weights"
    ),
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = TrainingPlan.steps,
    seed: Annotated[int, typer.Option(help="Of initial weights and data order.")] = 0,
    resume: Annotated[
        bool, typer.Option(help="Continue an interrupted run found in the directory.")
    ] = True,
) -> None:
    """Train the demo model from the language reference inside CPython, on one thread."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    state = out / "checkpoint.pt"
    if not resume:
        state.unlink(missing_ok=True)
    plan, corpus = TrainingPlan(steps=steps, seed=seed), python_topics()
    try:
        with terminal.training_bar(console) as on_step:
            lm = train(TinyConfig(), plan, corpus, checkpoint=state, progress=on_step)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; pass --no-resume to start again") from error
    command = f"lightning-indexer train --steps {steps} --seed {seed}"
    card = checkpoint.describe(lm, plan, corpus, command=command)
    checkpoint.save(lm, card, out)
    state.unlink(missing_ok=True)
    console.print(
        f"{card['parameters']} parameters, validation {card['validation_nats_per_byte']} nats a"
        f" byte, in {out}"
    )


@app.command(name="check-sharing")
def check_sharing_command(
    share: Annotated[
        bool, typer.Option(help="Leave sharing as the draft's config has it, or turn it off.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write what was found to this file.")
    ] = None,
) -> None:
    """Prove, by running it, that the demo model's draft shares its selection, and the right one.

    Ends with exit code 1 and the reason when sharing is not active or not right.
    """
    torch.set_num_threads(1)
    lm, _ = checkpoint.load()
    outcome = check_sharing(*build_for_check(lm), share=share)
    console = Console()
    console.print(terminal.sharing_table(outcome))
    if json_file is not None:
        text = json.dumps(outcome.as_json(), indent=2, ensure_ascii=False)
        json_file.write_text(text + "\n", "utf-8")
    if outcome.reason is not None:
        console.print(f"sharing is {outcome.reason}", style="red", markup=False)
        raise typer.Exit(1)
    console.print("sharing is active and right")


@app.command(name="compile-report")
def compile_report(
    targets: Annotated[
        str, typer.Option(help="Compile for these, separated by commas.")
    ] = "sm_80,sm_90,sm_100,sm_120,gfx942",
    op: Annotated[str | None, typer.Option(help="Compile the kernels of this op only.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows to this file; - is stdout.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes at a time (default: one a core).", min=1)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Where compiled kernels are kept, by default under ~/.cache."),
    ] = None,
) -> None:
    """Compile every kernel for GPUs that need not be here, and report what the machine code costs.

    Ends with exit code 1 if a kernel does not compile, cannot be counted, or spills registers.
    """
    if not HAS_TRITON:
        raise typer.BadParameter("compiling kernels needs Triton, which is not installed")
    from .offline import pool, table
    from .offline.case import TARGETS
    from .offline.report import report, to_json

    chosen = list(dict.fromkeys(targets.split(",")))
    if unknown := [name for name in chosen if name not in TARGETS]:
        raise typer.BadParameter(f"--targets knows {', '.join(TARGETS)}, got {unknown[0]!r}")
    with table.compile_bar() as on_done:
        compiled = pool.compile_all(chosen, op, jobs=jobs, folder=cache, on_done=on_done)
    if not compiled:
        raise typer.BadParameter(f"--op: no kernel of an op {op!r}")
    result = report(compiled)
    to_stdout = json_file is not None and str(json_file) == "-"
    table.print_report(result, Console(stderr=to_stdout))
    if to_stdout:
        sys.stdout.write(to_json(result))
    elif json_file is not None:
        json_file.write_text(to_json(result), "utf-8")
    if any(k.error or k.uncounted or k.spill_bytes for _, k in compiled):
        raise typer.Exit(1)


@app.command(name="build-kernels")
def build_kernels(
    out: Annotated[Path, typer.Option(help="Folder of the repository; made if need be.")] = Path(
        "indexer-kernels"
    ),
) -> None:
    """Write layers and ops as a local repository for Hugging Face's kernels package."""
    from .adapters.huggingface_kernels import build

    try:
        Console().print(f"built {build(out)}", soft_wrap=True, markup=False, highlight=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    if given and file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    if given:
        for text in given:
            _check_text(text)
        return given
    if file is not None:
        return [_decode(_read(file), str(file))]
    piped = _piped_input()
    return [_decode(piped, "standard input")] if piped else list(DEFAULT_PROMPTS)


def _read(file: Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from error


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source} must be UTF-8: {error}") from error


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of argv that are no UTF-8 arrive as surrogates
        raise typer.BadParameter(f"a prompt must be UTF-8: {error}") from error


def _piped_input() -> bytes:
    """What stands ready on standard input. An idle pipe must not make the program wait."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return b""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], 0.5)
    except (OSError, ValueError):  # no file descriptor: it cannot block
        ready = [sys.stdin]
    return sys.stdin.buffer.read() if ready else b""


def _report(
    card: dict[str, Any],
    prompts: list[str],
    job: Job,
    identical: bool,
    modes: dict[str, ModeResult],
    overlap: list[float] | None,
) -> dict[str, Any]:
    rows = {name: result.as_json() for name, result in modes.items()}
    if overlap is not None:
        rows["shared"]["overlap_by_step"] = overlap
    shown = ("parameters", "validation_nats_per_byte", "steps", "seed", "data", "data_sha256")
    return {
        "model": {name: card[name] for name in shown},
        "prompts": prompts,
        "max_new_tokens": job.max_new_tokens,
        "draft_tokens": job.draft_tokens,
        "graph": job.graph,
        "identical": identical if len(modes) > 1 else None,
        "modes": rows,
    }
