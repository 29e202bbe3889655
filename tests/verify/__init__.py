"""The reliability figures: everything that can be counted, run and counted by one command.

`PYTHONPATH=tests python -m verify` runs both passes of the suite with branch coverage, commits
every sin, runs a seeded sample of mutants, and prints what came of it. `floors.py` has what must
hold; the tables of docs/reliability.md are those of the last full run.
"""
