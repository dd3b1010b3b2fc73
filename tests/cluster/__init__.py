"""Emulated clusters: hosts in network namespaces, and programs that stand for Slurm's."""
