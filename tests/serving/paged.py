"""The scheduler of a few lines, which GPU checks and tests share."""

from hocket.doctor.paged import ToyScheduler, compare

__all__ = ["ToyScheduler", "compare"]
