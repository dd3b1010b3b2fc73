"""What tests of several folders share, as fixtures that tests/conftest.py makes known to all.

warm       jobs of this test run on the session's launcher: none pays for imports twice
runs       the same for small training runs (`job`), and no ledger is written
whole      an undisturbed run, made once for all tests that compare with it
workers    the worker process of rehearsals, made once for all; warm_workers: commands use it
ranks      `ranks.run("tests.room.cases:case", world_size=4)`: tests/ranks.py
"""
