"""Kernels in C between the matrix products of a step on a CPU; without a compiler, torch's own."""
