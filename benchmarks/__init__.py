"""Measured figures: hocket beside its peers, and its collectives beside Gloo's."""
