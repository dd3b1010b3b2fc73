"""A server whose ranks torchrun, srun or a Kubernetes Job started, on one host or on several.

    process of rank 0      front: HTTP, router; no torch  --Unix socket-->  a child, which is rank 0
    any other process      its rank, and nothing else

    payloads of the replicas          front -> child (stdin) -> the launcher's store -> ranks
    addresses of the other drivers    drivers -> store -> child -> files that the front reads

Replica r has the ranks r * size to (r + 1) * size - 1. All ranks share one fate: when one dies the
others leave, and the launcher starts the server again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, LayoutError, OptionError, RankFailure
from hocket.spec.layout import TERMS, Layout
from hocket.spec.legality import narrowed
from hocket.spec.serving import num_replicas

if TYPE_CHECKING:
    from hocket.jobs.serving.request import PreparedServer
    from hocket.launch import RankContext

ENTRY = "hocket.ranks.joined_serving:joined_rank"


# --- the process of rank 0 ------------------------------------------------------------------------


def joined_world() -> RankContext | None:
    """This process's place among ranks that another launcher started; None: it starts its own."""
    from hocket.launch import end_with_launcher, joined_context

    context = joined_context()
    if context is not None:
        end_with_launcher()
    return None if context is None or context.world_size == 1 else context


def options_of(context: RankContext, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the defaults of such a world: data parallelism over all ranks.

    Raises:
        OptionError: an option that needs ranks of the server's own.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("layout") == "auto":
        raise OptionError(
            "--layout auto chooses how many ranks to start; this launcher has started "
            f"{context.world_size}",
            hint=f"--layout tp{context.world_size}",
        )
    if not given.keys() & {"layout", *TERMS}:
        given["layout"] = f"dp{context.world_size}"
    if not context.one_machine and given.setdefault("cluster", "none") == "auto":
        raise OptionError("--cluster auto predicts for one machine", hint="--cluster none")
    return given


def require_world(layout: Layout, context: RankContext) -> None:
    """Reject a layout of another size than the launcher's world. Raises LayoutError."""
    if layout.world_size != context.world_size:
        dp = context.world_size // (layout.world_size // layout.dp)
        fits = narrowed(layout, dp=max(1, dp))
        hint = fits if fits.world_size == context.world_size else Layout(dp=context.world_size)
        raise LayoutError(
            f"the layout {layout.axes_text()} needs {layout.world_size} ranks; the launcher "
            f"started {context.world_size}",
            hint=f"--layout {hint.axes_text()}",
        )


class Ranks:
    """The child that is rank 0; through it, all ranks of all replicas.

    It is started at once, in the main thread, whose end it does not outlive: it imports what it
    needs while this process checks options, model and split.

    Args:
        server: what is served; gives the number of replicas, threads and device.
    """

    def __init__(self, server: PreparedServer) -> None:
        self.replicas = num_replicas(server.layout)
        self._payloads: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._code: int | None = None
        self._killed = False
        given = {
            "parent": os.getpid(),
            "threads": server.request.options.threads,
            "device": server.device,
        }
        self._child = subprocess.Popen(
            [sys.executable, "-m", "hocket.jobs.serving.joined", json.dumps(given)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to the launcher's group is the front's to handle
        )

    def launchers(self) -> list[JoinedLauncher]:
        """One for each replica."""
        return [JoinedLauncher(self, number) for number in range(self.replicas)]

    def run(self, number: int, size: int, payload: dict[str, Any]) -> None:
        """Start all ranks once every replica is to be started; returns when they have left.

        Raises:
            RankFailure: they failed, or there were only these ranks, and they have left before.
        """
        with self._changed:
            if number in self._payloads:
                raise RankFailure("the ranks have ended; their launcher starts them again")
            self._payloads[number] = payload
            self._changed.notify_all()
            if number:
                self._changed.wait_for(lambda: self._code is not None)
            else:
                self._changed.wait_for(lambda: len(self._payloads) == self.replicas or self._killed)
        if not number:
            code = -1 if self._killed else self._start(size)
            with self._changed:
                self._code = code
                self._changed.notify_all()
        if self._code:
            raise RankFailure(
                f"rank 0 ended with exit code {self._code}; its output, and the other ranks', is "
                "in the launcher's log"
            )

    def _start(self, size: int) -> int:
        """Hand the child what to serve, and wait for its end. Its exit code."""
        payloads = [self._payloads[number] for number in range(self.replicas)]
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its code says more
            self._child.stdin.write(json.dumps({"size": size, "payloads": payloads}))
            self._child.stdin.close()
        return self._child.wait()

    def kill(self) -> None:
        """End rank 0 at once; the others learn of it from the store."""
        with self._changed:
            self._killed = True
            self._changed.notify_all()
        self._child.kill()
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
        self._child.wait()


class JoinedLauncher:
    """One replica's launcher, as `Replicas` uses one."""

    alive = True

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number

    def run(self, entry: str, size: int, payload: dict[str, Any], **_: Any) -> None:
        """Returns when the replica's ranks have left. Raises RankFailure."""
        self.ranks.run(self.number, size, payload)

    def kill(self) -> None:
        """End all ranks at once."""
        self.ranks.kill()

    def close(self) -> None:
        """Nothing is its own."""


# --- the ranks ------------------------------------------------------------------------------------


def be_a_rank(*, trust_remote_code: bool, threads: int, device: str) -> None:
    """In a process that is not rank 0: serve until rank 0 stops the server."""
    from hocket.launch import run_joined

    payload = {"trust_remote_code": trust_remote_code}
    run_joined(ENTRY, payload, threads=threads, device=device)


def main() -> int:
    """The child of the front: be rank 0."""
    from hocket.launch import run_joined
    from hocket.spec.parent_process import die_with

    given = json.loads(sys.argv[1])
    die_with(given["parent"])
    try:
        run_joined(ENTRY, {}, threads=given["threads"], device=given["device"])
    except HocketError as error:
        print(f"hocket: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
