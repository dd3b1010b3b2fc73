"""Starts, watches and ends the ranks of one machine, or joins those of another launcher."""

from hocket.launch.context import RankContext
from hocket.launch.joined import (
    joined_context,
    launched_ranks,
    leave_together,
    leave_unused,
    main_address,
    run_joined,
)
from hocket.launch.joined_store import await_key
from hocket.launch.launcher import Launcher, Terminated
from hocket.launch.orphan import end_with_launcher

__all__ = [
    "Launcher",
    "RankContext",
    "Terminated",
    "await_key",
    "end_with_launcher",
    "joined_context",
    "launched_ranks",
    "leave_unused",
    "leave_together",
    "main_address",
    "run_joined",
]
