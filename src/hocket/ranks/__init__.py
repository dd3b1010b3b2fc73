"""Ranks: what a rank, or another process that a job starts, does; the parent is in `jobs`."""
