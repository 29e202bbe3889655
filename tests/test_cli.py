"""The command line: what it prints, writes and refuses."""

import json
import subprocess
import sys
from functools import partial

import pytest
from typer.testing import CliRunner

from lightning_indexer import cli
from lightning_indexer.cli import DEFAULT_PROMPTS, app
from lightning_indexer.tinylm import checkpoint
from lightning_indexer.tinylm.corpus import split_text
from lightning_indexer.tinylm.evaluation import draft_held_out

pytestmark = pytest.mark.once  # the shipped model takes minutes in the interpreter

PROMPT = "The for statement is used to"
FIELDS = {
    "texts",
    "new_tokens",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_by_position",
    "indexer_rows_computed",
    "indexer_rows_skipped",
    "seconds",
}
LIMIT = checkpoint.load()[0].config.max_model_len


def run(*arguments: str, **kwargs):
    return CliRunner().invoke(app, ["generate", *arguments], **kwargs)


@pytest.mark.parametrize("graph", ["eager", "recorded"])
def test_comparison_is_identical_and_skips_exactly_the_later_steps(tmp_path, graph):
    file = tmp_path / "out.json"
    prompts = ["--prompt", PROMPT, "--prompt", "A class definition"]
    options = ["--max-new-tokens", "12", "--draft-tokens", "3", "--graph", graph]
    result = run(*prompts, *options, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "all texts identical" in result.output

    report = json.loads(file.read_text())
    assert report["identical"] is True
    assert report["draft_tokens"] == 3
    assert report["model"]["parameters"] > 0
    assert 0 < report["model"]["validation_nats_per_byte"] <= 1.35
    modes = report["modes"]
    assert list(modes) == ["greedy", "fresh", "shared"]
    assert modes["shared"].keys() == FIELDS | {"overlap_by_step"}
    assert modes["greedy"].keys() == modes["fresh"].keys() == FIELDS
    assert modes["greedy"]["texts"] == modes["fresh"]["texts"] == modes["shared"]["texts"]
    assert all(mode["new_tokens"] == 24 for mode in modes.values())
    assert modes["greedy"]["rounds"] == 2 * 11

    fresh, shared = modes["fresh"], modes["shared"]
    assert fresh["indexer_rows_skipped"] == 0
    assert shared["indexer_rows_skipped"] == shared["rounds"] * 2  # steps 1 and 2 of each
    assert shared["drafted"] == shared["rounds"] * 3
    assert len(shared["acceptance_by_position"]) == 3
    assert len(shared["overlap_by_step"]) == 2
    assert all(0 < overlap <= 1 for overlap in shared["overlap_by_step"])


@pytest.mark.parametrize("draft_tokens", ["0", "1"])
def test_rounds_without_a_second_draft_skip_nothing(tmp_path, draft_tokens):
    file = tmp_path / "out.json"
    result = run(
        *["--prompt", PROMPT, "--max-new-tokens", "6", "--draft-tokens", draft_tokens],
        *["--json", str(file)],
    )
    assert result.exit_code == 0, result.output
    shared = json.loads(file.read_text())["modes"]["shared"]
    assert shared["indexer_rows_skipped"] == 0
    assert shared["overlap_by_step"] == []


@pytest.mark.parametrize("mode", ["greedy", "fresh", "shared"])
def test_a_single_mode_runs_alone(tmp_path, mode):
    file = tmp_path / "out.json"
    result = run(
        *["--prompt", PROMPT, "--max-new-tokens", "4", "--mode", mode, "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert list(report["modes"]) == [mode]
    assert report["identical"] is None, "nothing was compared"


def test_prompt_file_and_standard_input_are_read(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    options = ["--max-new-tokens", "4", "--mode", "greedy"]
    from_file = run("--prompt-file", str(file), *options)
    piped = run(*options, input=PROMPT)
    dashed = run("--prompt-file", "-", *options, input=PROMPT)
    given = run("--prompt", PROMPT, *options)
    for result in (from_file, piped, dashed, given):
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[0] == given.output.splitlines()[0]


def test_without_any_prompt_the_defaults_run():
    result = run("--max-new-tokens", "2", "--mode", "greedy")
    assert result.exit_code == 0, result.output
    for prompt in DEFAULT_PROMPTS:
        assert prompt in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", ""], "prompt 1 must be 1 to"),
        (["--prompt", "x" * (LIMIT + 1)], f"got {LIMIT + 1}"),
        (["--prompt", "ok", "--prompt", "x" * LIMIT], f"prompt 2 must be 1 to {LIMIT - 48} bytes"),
        (["--prompt", "ok", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--prompt", "ok", "--max-new-tokens", str(LIMIT)], "max_new_tokens must be"),
        (["--prompt", "a", "--prompt-file", "b"], "not both"),
        (["--prompt-file", "no/such/file"], "cannot read"),
        (["--prompt", "caf\udce9"], "must be UTF-8"),
        (["--prompt", "ok", "--mode", "fastest"], "fastest"),
        (["--prompt", "ok", "--draft-tokens", "-1"], "greater than or equal to 0"),
    ],
)
def test_a_bad_request_is_refused_with_exit_code_2(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"\n"])
def test_a_prompt_file_that_is_empty_or_no_text_is_refused(tmp_path, content):
    file = tmp_path / "prompt"
    file.write_bytes(content)
    result = run("--prompt-file", str(file))
    assert result.exit_code == 2
    assert "must be" in result.output


def test_argument_bytes_that_are_no_text_are_refused():
    command = [sys.executable, "-m", "lightning_indexer", "generate", "--prompt", b"caf\xe9"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_training_run_writes_weights_and_card(tmp_path, monkeypatch):
    text = "the quick brown fox jumps over the lazy dog. " * 600
    monkeypatch.setattr(cli, "python_topics", lambda: split_text(text, source="a fox"))
    brief = partial(draft_held_out, num_prompts=2, new_tokens=2)
    monkeypatch.setattr(checkpoint, "draft_held_out", brief)
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path), "--steps", "1"])
    assert result.exit_code == 0, result.output
    lm, card = checkpoint.load(tmp_path)
    assert card["steps"] == 1
    assert card["data"] == "a fox"
    assert card["command"] == "lightning-indexer train --steps 1 --seed 0"
    assert {file.name for file in tmp_path.iterdir()} == {"tinylm.safetensors", "model_card.json"}
    assert sum(p.numel() for p in lm.parameters()) == card["parameters"]
