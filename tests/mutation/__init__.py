"""Mutation score of kernels/, indexer/ and speculator/, with cosmic-ray's operators.

    PYTHONPATH=tests python -m mutation [--sample N --seed S] [--only FILE …] [--jobs N]

A mutant is the code with one small change: < for <=, + for -, a number one more, a `not` added. The
tests that were seen to call its function run until one fails; a mutant that none rejects has
survived, and must be explained in `survivors/`. docs/reliability.md has the figures.
"""
