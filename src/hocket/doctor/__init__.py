"""The report card: one table of GPU checks, executed on GPUs or rehearsed without one."""
