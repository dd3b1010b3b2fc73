"""Fuzzing: every file and request that comes from outside, mutated, read by hocket's own readers.

    python -m tests.fuzz                      10,000 inputs of each kind, and a table
    python -m tests.fuzz --kinds run.json --inputs 100 --seed 7
    python -m tests.fuzz --kinds run.json --replay 4711       one input again, with its traceback

Each input is a function of seed, kind and number. It must be answered with a right result or with
a HocketError that has a message: no other exception, no signal, no more than 2 GB, no more than
10 s of processor time, nothing written outside the input's folder, no program run, no address
called.
"""
