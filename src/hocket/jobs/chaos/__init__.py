"""Chaos: faults injected into real training jobs, from a seed, and what became of each."""
