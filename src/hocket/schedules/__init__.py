"""Layout to Schedule: the named schedules, the passes that lower them, the check, the file."""

from hocket.schedules.file import load_schedule
from hocket.schedules.lower import add_communication, add_reduce_grad, lower, relower
from hocket.schedules.registry import NAMES, build_schedule
from hocket.schedules.validate import validate_schedule

__all__ = [
    "NAMES",
    "add_communication",
    "add_reduce_grad",
    "build_schedule",
    "load_schedule",
    "lower",
    "relower",
    "validate_schedule",
]
