"""Sins: wrong code that somebody could write, each rejected by tests that the suite has.

A file is one sin: fields, an empty line, then lines of the code around it and those taken out and
put in, as a patch has them but without line numbers. What it takes out must occur once.

    what: ties at the k-th score go to the larger position
    file: kernels/topk_cpu.py
    backend: cpu
    tests: tests/test_topk.py::test_tie_prefers_smaller_position

         above = scores > kth
    -    tied = chosen ^ above
    +    tied = chosen

`backend` is cpu or interpreter. `tests` names one or more, the narrowest that must reject the sin.
`PYTHONPATH=tests python -m sins` commits each in a copy of the tree and runs its tests.
"""
