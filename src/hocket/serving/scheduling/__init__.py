"""Scheduling: which tokens of which requests go into the next step; imports no torch."""
