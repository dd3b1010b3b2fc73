"""Triton kernels of the runtime, and how they are compiled and checked without a GPU."""
