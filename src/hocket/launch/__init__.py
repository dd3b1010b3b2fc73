"""Starts, watches and ends the ranks of one machine, or joins those of another launcher."""

from hocket.launch.context import RankContext
from hocket.launch.joined import joined, main_address, run_joined, wait_until_asked
from hocket.launch.launcher import Launcher, Terminated

__all__ = [
    "Launcher",
    "RankContext",
    "Terminated",
    "joined",
    "main_address",
    "run_joined",
    "wait_until_asked",
]
