"""Parallelism itself, on any `nn.Module`. Knows torch, and no model family."""
