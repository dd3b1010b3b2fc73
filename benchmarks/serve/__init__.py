"""hocket's serving beside its peers, in one run: `python -m benchmarks.serve`."""
