"""Fitting the cost model's constants to measured tables; needs scipy, which hocket does not."""
