"""What a server has before there are ranks: run folder, sockets, chat templates, launchers."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.jobs import lock, prepare
from hocket.jobs.serving import request as serve_request
from hocket.jobs.serving.request import PreparedServer
from hocket.spec.errors import RunFolderError
from hocket.spec.run import RunFolder

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.serving.front.renderer import Renderer


def server_folder(server: PreparedServer) -> RunFolder:
    """The run folder asked for, or a new name under `runs/`.

    Raises:
        RunFolderError: it holds a run already, or cannot be made.
    """
    asked = server.request.run
    if asked is None:
        stem = Path("runs") / f"{server.name.replace(os.sep, '-')}-serve"
        return RunFolder(prepare.new_folder(stem))
    folder = RunFolder(asked)
    lock.reject_locked(folder.path)
    if folder.spec_file.exists():
        names = (folder.path.with_name(f"{folder.path.name}-{k}") for k in itertools.count(2))
        free = next(name for name in names if not name.exists())
        raise RunFolderError(f"{folder.path} already holds a run", hint=f"--run {free}")
    path = folder.path.absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written to" if there.is_dir() else "is a file, not a folder"
        raise RunFolderError(
            f"{folder.path} cannot be made: {there} {why}", hint="--run runs/served"
        )
    return folder


def listeners(
    server: PreparedServer, stack: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    """The sockets of requests and of metrics. Raises OptionError where one is taken."""
    options = server.options
    assert options.metrics_port is not None
    front = serve_request.listener(options.host, options.port)
    stack.callback(front.close)
    metrics = serve_request.listener(options.host, options.metrics_port, "--metrics-port")
    stack.callback(metrics.close)
    return front, metrics


def chat_templates(server: PreparedServer, stack: contextlib.ExitStack) -> Renderer | None:
    """What renders the model's chats; closed with the stack. Raises HocketError: it cannot."""
    from hocket.models.chat_template import file_of, written_templates
    from hocket.serving.front.renderer import Renderer
    from hocket.serving.http.settings import HttpSettings

    file = server.options.chat_template_file
    texts, words = written_templates(server.source.tokenizer, file_of(file) if file else None)
    if not texts:
        return None
    return stack.enter_context(Renderer(texts, words, seconds=HttpSettings.render_seconds))


class Launchers:
    """Makes the launcher of each replica; closed with the stack."""

    def __init__(self, server: PreparedServer, stack: contextlib.ExitStack) -> None:
        self.server = server
        self.stack = stack

    def local(self) -> Launcher:
        """One for checks on this host's CPU, where another launcher starts the ranks."""
        from hocket.launch import Launcher

        threads = self.server.request.options.threads
        return self.stack.enter_context(Launcher("cpu", threads))

    def make(self, number: int) -> Launcher:
        """A warm one for the replica of that number, with GPUs of its own."""
        from hocket.jobs.serving.gpus import replica_gpus
        from hocket.jobs.train import modeling_modules
        from hocket.launch import Launcher
        from hocket.ranks.serving import PRELOAD

        size = self.server.replica.world_size
        # A rank's threads sleep while they wait for each other: spinning ones hold a core that the
        # front needs, and wait whole slices of the scheduler for a partner that it put aside.
        environment: Mapping[str, str] = {
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        }
        if self.server.device == "cuda":
            devices = replica_gpus(number, size)
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        preload = (*PRELOAD, "hocket.ranks.serving", "hocket.runtime.shm")
        return self.stack.enter_context(
            Launcher(
                self.server.device,
                self.server.request.options.threads,
                preload=(*preload, *modeling_modules(self.server.source.config)),
                environment=environment,
            )
        )


def require_split(launcher: Launcher, server: PreparedServer) -> None:
    """Refuse an architecture that would compute something else when it is split, or served."""
    from hocket.jobs.proxy.check import require_equal

    attention = server.request.options.attention
    require_equal(
        launcher, server.source, server.replica, attention=attention, loss=False, pages=True
    )


def kernels_remark(server: PreparedServer) -> str | None:
    """Why CPU ranks compute without kernels in C, and the fix; None where they have them."""
    from hocket.runtime.native.library import library_remark

    return library_remark() if server.device == "cpu" else None
