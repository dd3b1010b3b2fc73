"""What a server has before there are ranks: run folder, sockets, chat templates, launchers, folders
of the drivers' sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.jobs import lock, prepare
from hocket.jobs.serving.eight_bits import require_eight_bits
from hocket.jobs.serving.request import PreparedServer
from hocket.jobs.writable import require_writable
from hocket.spec.errors import OptionError, RunFolderError
from hocket.spec.run import RunFolder

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.serving.front.renderer import Renderer


def folder_prefix() -> str:
    """How folders of sockets begin that this host's servers make, before the parent's process id:
    other hosts and containers, with ids of their own, may share the directory."""
    place = f"{socket.gethostname()} {lock.pid_namespace()}"
    return f"hocket-driver-{zlib.crc32(place.encode()):08x}-"


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
        free = prepare.free_name(folder.path)
        raise RunFolderError(f"{folder.path} already holds a run", hint=f"--run {free}")
    require_writable(folder, "runs/served")
    return folder


def require_startable(server: PreparedServer) -> None:
    """What a start would find out about this host, without one: the run folder, both addresses, the
    chat template. Nothing is left behind.

    Raises:
        HocketError: the first that cannot be.
    """
    with contextlib.ExitStack() as stack:
        if server.request.run is not None:  # without a name a start makes a new folder
            server_folder(server)
        listeners(server, stack)
        chat_templates(server, stack)


def listeners(
    server: PreparedServer, stack: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    """The sockets of requests and of metrics, bound before there are ranks, so that nothing else
    takes the ports meanwhile; closed with the stack. Raises OptionError where one is taken."""
    options = server.options
    assert options.metrics_port is not None
    ports = (("--port", options.port), ("--metrics-port", options.metrics_port))
    front, metrics = (
        stack.enter_context(_listener(options.host, port, flag)) for flag, port in ports
    )
    return front, metrics


def _listener(host: str, port: int, flag: str) -> socket.socket:
    """Raises OptionError: the port is taken or not ours to take, or not an address of this host."""
    try:
        found = _opened(host, port)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                hint = f"{flag} {_free_port(host, port)}, or {flag} 0 for a free one"
            case errno.EACCES:
                hint = f"{flag} {DEFAULT_PORTS[flag]}: ports below 1024 are the administrator's"
            case _:
                hint = "--host 127.0.0.1, or --host 0.0.0.0 for every address of this machine"
        raise OptionError(f"{host}:{port} cannot be opened: {error.strerror}", hint=hint) from None
    found.setblocking(False)
    return found


DEFAULT_PORTS = {"--port": 8000, "--metrics-port": 8001}


def _opened(host: str, port: int) -> socket.socket:
    (family, _, _, _, address), *_ = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        # A second server would be let in until the first one listens.
        found.listen(128)
    except OSError:
        found.close()
        raise
    return found


def _free_port(host: str, taken: int) -> int:
    """The next port that is free together with the one after it, which metrics have unless another
    is named. 0: there is none."""
    for port in range(taken + 1, 65535):
        with contextlib.suppress(OSError), _opened(host, port), _opened(host, port + 1):
            return port
    return 0


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
    """Refuse an architecture that would compute something else when it is split, or served, or
    that has nothing to store as the server is asked to."""
    from hocket.jobs.proxy import require_equal

    attention = server.request.options.attention
    require_equal(
        launcher, server.source, server.replica, attention=attention, loss=False, pages=True
    )
    if server.options.quantization is not None:
        require_eight_bits(launcher, server.source, server.replica)


def kernels_remark(server: PreparedServer) -> str | None:
    """Why CPU ranks compute without kernels in C, and the fix; None where they have them."""
    from hocket.runtime.native.library import library_remark

    return library_remark() if server.device == "cpu" else None


def sweep_folders(where: Path) -> None:
    """Remove the folders of this user's and host's servers that were killed while their ranks
    started."""
    prefix = folder_prefix()
    for folder in where.glob(f"{prefix}*"):
        number = folder.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):
            mine = folder.is_dir() and not folder.is_symlink()
            if not mine or folder.stat().st_uid != os.getuid() or not number.isdigit():
                continue
            if not Path(f"/proc/{number}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def replica_gpus(number: int, size: int) -> list[str]:
    """The GPUs of one replica, among those that this process may use.

    Raises:
        OptionError: there are fewer: another program's GPU is not taken.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = range(number * size, (number + 1) * size)
    if not seen:
        return [str(i) for i in mine]
    names = [name.strip() for name in seen.split(",")]
    if mine[-1] >= len(names):
        raise OptionError(
            f"replica {number} needs GPUs {mine[0]} to {mine[-1]} of those that this process may "
            f"use; CUDA_VISIBLE_DEVICES={seen} names {len(names)}",
            hint=f"fewer replicas, or CUDA_VISIBLE_DEVICES with {mine[-1] + 1} GPUs",
        )
    return [names[i] for i in mine]
