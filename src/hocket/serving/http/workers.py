"""Workers: threads for what would hold up the event loop, few, bounded, and ended when too long.

Rendering a chat and tokenizing a long text take milliseconds, or as long as somebody has found a
way to make them take. Each job has a thread of its own; one that runs over its time is
interrupted at its next bytecode, and if it is in C and does not hear, its place is given to
another and it is counted until it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hocket.serving.http.errors import ApiError

Result = TypeVar("Result")

MOST_LOST = 8
"""Threads that may be over their time at once; then jobs are refused until some come back."""

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


class Overran(BaseException):
    """Raised inside a thread whose time is over."""


class WorkerThreads:
    """Runs jobs in threads.

    Args:
        count: jobs that run at once. max_jobs: that wait; more are answered with a 429.
    """

    def __init__(self, count: int, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self.waiting = 0
        self._places = asyncio.Semaphore(count)
        self._lost: set[_Job] = set()

    async def run(
        self, seconds: float, what: str, job: Callable[..., Result], *args: Any
    ) -> Result:
        """`job(*args)` in a thread.

        Raises:
            ApiError: too many jobs wait, or it took longer than `seconds`.
            Exception: whatever the job raises.
        """
        self._lost = {lost for lost in self._lost if lost.thread.is_alive()}
        if self.waiting >= self.max_jobs or len(self._lost) >= MOST_LOST:
            raise ApiError(
                429,
                f"{self.waiting} requests wait to be rendered or tokenized",
                code="workers_full",
                retry_after=1.0,
            )
        self.waiting += 1
        try:
            async with self._places:
                running = _Job(job, args)
                try:
                    async with asyncio.timeout(seconds):
                        return await running.start()
                except TimeoutError:
                    raise ApiError(400, f"{what} took longer than {seconds:g} s") from None
                finally:
                    if running.interrupt():
                        self._lost.add(running)
        finally:
            self.waiting -= 1


class _Job:
    """One thread."""

    def __init__(self, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._job, self._args = job, args
        self._lock = threading.Lock()
        self._done = False
        self.thread = threading.Thread(target=self._run, name="hocket-worker", daemon=True)

    def start(self) -> asyncio.Future[Any]:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self._loop.create_future()
        self.thread.start()
        return self._future

    def _run(self) -> None:
        found, error = None, None
        try:
            try:
                found = self._job(*self._args)
            except Exception as raised:
                error = raised
            with self._lock:
                self._done = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, found, error)
        except Overran:
            self._done = True

    def _tell(self, found: Any, error: Exception | None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(found)
        else:
            self._future.set_exception(error)

    def interrupt(self) -> bool:
        """End the thread at its next bytecode. Whether it was still running."""
        with self._lock:
            if self._done or self.thread.ident is None:
                return False
            _raise_in(self.thread.ident, Overran)
            return True
