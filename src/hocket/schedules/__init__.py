"""Layout to Schedule: the named schedules, the passes that lower them, the check, the file."""

from hocket.schedules.file import load, save
from hocket.schedules.lower import add_communication, add_reduce_grad, lower, relower
from hocket.schedules.registry import NAMES, build
from hocket.schedules.validate import validate

__all__ = [
    "NAMES",
    "add_communication",
    "add_reduce_grad",
    "build",
    "load",
    "lower",
    "relower",
    "save",
    "validate",
]
