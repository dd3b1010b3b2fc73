"""Configurations of other tools, read as layouts. Nothing that is read is executed."""
