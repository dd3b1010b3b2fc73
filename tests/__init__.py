"""Tests, sorted by what they need; the server of the ranks imports their cases as `tests.*`."""
