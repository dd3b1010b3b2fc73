"""The scheduler of a few lines, which GPU checks and tests share."""

from hocket.doctor.paged import ToyScheduler, compare_pages

__all__ = ["ToyScheduler", "compare_pages"]
