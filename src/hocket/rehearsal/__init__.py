"""Rehearsal: a job's real program, rank by rank, on fake CUDA tensors, without a GPU."""
