"""The proxy check: a tiny model of the same class, split, compared with itself in one piece."""
