"""The job behind `hocket serve`: from what is asked to an address that answers, and to its end.

    checked -> address bound, launchers warm -> layout chosen, split checked, predicted
        -> run folder -> ranks -> ready -> ... -> drained, or ended at once -> what was measured

This process holds the address, the text and the queue's front; it never imports torch. A first
SIGTERM or Ctrl-C lets the running requests end; a second one ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import ledger, lock
from hocket.jobs.background_load import BackgroundLoad
from hocket.jobs.record import JobRecorder
from hocket.jobs.serving import forecast as serve_forecast
from hocket.jobs.serving import joined, reload
from hocket.jobs.serving import request as serve_request
from hocket.jobs.serving.measured import Keeper
from hocket.jobs.serving.replicas import DriverConnection, ReplicaOptions, ReplicaSet
from hocket.jobs.serving.request import PreparedServer
from hocket.jobs.serving.start import (
    Launchers,
    chat_templates,
    kernels_remark,
    listeners,
    require_split,
    server_folder,
)
from hocket.spec.errors import OptionError
from hocket.spec.files import write_text
from hocket.spec.run import RunFolder
from hocket.spec.serving import BLOCK_SIZE, num_replicas
from hocket.spec.serving_forecast import ServingMeasured

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.serving.front.renderer import Renderer
    from hocket.serving.front.router import Router
    from hocket.serving.http.server import Front

Event = dict[str, Any]
Listener = Callable[[Event], None]

ENTRY = "hocket.ranks.serving:main"
ENDED, LAST = 15.0, 2.0
"""Seconds in which ranks are surely gone, and in which the last answers are written."""

STARTUP = 1800.0
"""Seconds until a rank's first sign of life: reading weights from a slow disk takes minutes."""


@dataclasses.dataclass(kw_only=True)
class ServerResult:
    """What a server came to.

    Attributes:
        run: its folder. address, metrics: where it listened.
        measured: what it did. drained: whether all its requests ended in the time they had.
        interrupted: Ctrl-C came before it was ready. forced: a second signal ended requests before
            the time that they had.
    """

    run: Path
    address: str
    metrics: str
    measured: ServingMeasured
    drained: bool = True
    interrupted: bool = False
    forced: bool = False


def serve_model(
    model: str | os.PathLike[str],
    *,
    layout: Any = None,
    on_event: Listener | None = None,
    **options: Any,
) -> ServerResult | None:
    """Serve a model until a signal asks for the end.

    Under torchrun, srun or a Kubernetes Job every rank calls it (`jobs.serving.joined`).

    Args:
        model: a Hugging Face directory with weights and a tokenizer, or a run folder.
        layout: `tp2.pp2.dp2`: dp are replicas; or `auto`. None: dp1, or dp over all ranks that
            another launcher started.
        on_event: called with each event: `phase`, `note`, `ready` (with `address`, `metrics` and
            `run`), `ended`.
        **options: any other flag of `hocket serve`, with underscores.

    Returns:
        What the server came to; None in a process of another launcher that is not rank 0.

    Raises:
        HocketError: what the caller can mend, before any rank starts wherever possible; or what
            has ended the last replica.
    """
    from hocket.models.text_part import left_out

    began = time.monotonic()
    record = JobRecorder(on_event)
    context = joined.joined_world()
    asked = {"layout": layout, **options}
    if context is not None:
        asked = joined.options_of(context, asked)
        if context.rank > 0:
            joined.be_a_rank(
                trust_remote_code=bool(asked.get("trust_remote_code", False)),
                threads=asked.get("threads", 1),
                device=asked.get("device", "auto"),
            )
            return None
    server = serve_request.server({"model": os.fspath(model), **asked})
    if context is not None:
        joined.require_world(server.layout, context)
    if reload.folder_of(server) is not None and context is not None:
        raise OptionError(
            "reload_dir: ranks of another launcher cannot be started again one replica at a time",
            hint="without torchrun or srun",
        )
    fresh = server.request.run is None or not server.request.run.exists()
    folder = server_folder(server)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.locked(folder.path, "serve"))
        stack.enter_context(unready_is_no_run(folder, fresh=fresh))
        doors = listeners(server, stack)
        launchers = Launchers(server, stack)
        first = launchers.make(0) if context is None else launchers.local()
        ranks = None if context is None else joined.Ranks(server)
        if ranks is not None:
            stack.callback(ranks.kill)
        templates = chat_templates(server, stack)
        for warning in filter(None, (*server.warnings, kernels_remark(server))):
            record.note(f"warning: {warning}")
        if parts := left_out(server.source.weights):
            record.note(f"of the multimodal model not loaded: {parts}")
        if model_defaults := server.sampling.text():
            record.note(
                f"the model's generation_config.json: {model_defaults}, where a request omits "
                "them (--generation-config none: without)"
            )
        server, forecast = serve_forecast.settle_layout(server, first, record)
        require_split(first, server)
        others = range(1, num_replicas(server.layout) if ranks is None else 1)
        ready: list[Any] = [first, *(launchers.make(n) for n in others)]
        if ranks is not None:
            first.close()
            ready = list(ranks.launchers())
        folder.create(server.spec())
        write_text(folder.forecast_file, forecast.to_json())
        for line in serve_forecast.bill(server, forecast):
            record.note(line)
        served = asyncio.run(
            _serve(
                server,
                folder=folder,
                launchers=ready,
                relaunch=launchers.make,
                templates=templates,
                doors=doors,
                record=record,
                began=began,
                max_restarts=server.options.max_restarts if context is None else 0,
            )
        )
        if served.interrupted:
            raise KeyboardInterrupt
        return served


# --- before there are ranks -----------------------------------------------------------------------


@contextlib.contextmanager
def unready_is_no_run(folder: RunFolder, *, fresh: bool) -> Iterator[None]:
    """Within, a server that ends before it was ready leaves no run behind, and if it is `fresh`
    no folder."""
    try:
        yield
    finally:
        if not measured_file(folder).exists():
            for file in (folder.spec_file, folder.forecast_file):
                file.unlink(missing_ok=True)
            if fresh:
                shutil.rmtree(folder.path, ignore_errors=True)


def measured_file(folder: RunFolder) -> Path:
    """Where what a server did is kept."""
    return folder.path / "measured.json"


# --- the server -----------------------------------------------------------------------------------


class Ends:
    """What asks for the end: the first signal gently, the second at once."""

    def __init__(self) -> None:
        self.gently = asyncio.Event()
        self.at_once = asyncio.Event()
        self.number = 0

    def ask(self, number: int) -> None:
        """A signal came."""
        self.number = number
        (self.at_once if self.gently.is_set() else self.gently).set()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Within, SIGTERM, SIGINT and a closed terminal are heard; in the main thread."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it is ignored
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.ask, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def replica_options(server: PreparedServer, folder: RunFolder | None = None) -> ReplicaOptions:
    payload = {"spec": server.spec(replica=True).to_json(), "words": server.words_payload()}
    return ReplicaOptions(
        entry=ENTRY,
        size=server.replica.world_size,
        payload=payload if folder is None else {**payload, "run": str(folder.path.resolve())},
        startup_timeout=STARTUP,
        silence_timeout=server.request.options.timeout,
        logs=None if folder is None else folder.path / "logs",
    )


async def _serve(
    server: PreparedServer,
    *,
    folder: RunFolder,
    launchers: list[Launcher],
    relaunch: Callable[[int], Launcher],
    templates: Renderer | None,
    doors: tuple[socket.socket, socket.socket],
    record: JobRecorder,
    began: float,
    max_restarts: int,
) -> ServerResult:
    from hocket.serving.front.router import Router

    router = Router(server.options.block_size or BLOCK_SIZE)
    replicas = ReplicaSet(
        launchers,
        replica_options(server, folder),
        router,
        _connect,
        relaunch=relaunch,
        say=record.note,
        max_restarts=max_restarts,
    )
    keeper = Keeper(str(server.layout), router, replicas, measured_file(folder))
    ends, background_load = Ends(), BackgroundLoad()
    address, metrics = _address(doors[0]), _address(doors[1])
    keys = server.options.api_key_file
    record.phase("starting ranks")
    with ends.heard():
        front = await _open(server, router, replicas, templates, doors)
        reloads = reload.folder_of(server)
        if reloads is not None:
            front.service.reload = load = reload.Reload(server, replicas, reloads, record.note)
            reload.on_hangup(load.signalled)
        replicas.start()
        try:
            if await _until(ends.gently, replicas.ready(), front.failed):
                keeper.begin(time.monotonic() - began)
                background_load = BackgroundLoad()
                record(
                    {
                        "event": "ready",
                        "address": address,
                        "metrics": metrics,
                        "run": str(folder.path),
                        "model": server.name,
                        "api_key_file": keys and os.path.expanduser(keys),
                        "layout": server.layout.axes_text(),
                        "seconds": time.monotonic() - began,
                        "replicas": [dict(one.capacity) for one in replicas.replicas],
                    }
                )
                keeping = asyncio.create_task(keeper.keep())
                try:
                    await _until(ends.gently, replicas.fatal, front.failed)
                finally:
                    keeping.cancel()
            drained = await _end(
                server,
                router=router,
                replicas=replicas,
                front=front,
                keeper=keeper,
                ends=ends,
                record=record,
            )
        finally:
            if not ends.gently.is_set():  # it failed: nothing may be left
                replicas.kill()
            await replicas.end()
            await front.close(0.0)
    found, others = keeper.measured(), background_load.cores()
    if keeper.begun:
        try:  # it has ended well: a full disk, or a folder that is gone, cannot undo that
            found = keeper.last()
            write_text(folder.background_load_file, json.dumps({"cores": others}))
        except OSError as error:
            record.note(f"warning: what was measured is not kept: {error}")
        ledger.enter(folder.path, record.note, others=others)
    else:
        record.note("ended before every replica was ready; no run was recorded")
    record({"event": "ended", "drained": drained, "run": str(folder.path)})
    return ServerResult(
        run=folder.path,
        address=address,
        metrics=metrics,
        measured=found,
        drained=drained,
        interrupted=not keeper.begun and ends.number == signal.SIGINT,
        forced=not drained and ends.at_once.is_set(),
    )


async def _end(
    server: PreparedServer,
    *,
    router: Router,
    replicas: ReplicaSet,
    front: Front,
    keeper: Keeper,
    ends: Ends,
    record: JobRecorder,
) -> bool:
    """Let what runs end, within the time it has. Whether all of it did."""
    seconds = server.options.drain_seconds
    name = signal.Signals(ends.number).name if ends.number else "the end"
    running = router.running
    if running:
        record.note(
            f"{name}: {running} requests have {seconds:g} s to end; a second signal ends them now"
        )
    router.close("the server is ending")
    replicas.ending = True
    # What outlasts its time ends with its replica, and gets that error, before its connection does.
    closing = asyncio.ensure_future(front.close(seconds + ENDED))
    await _until(ends.at_once, _emptied(router), asyncio.sleep(seconds))
    # Not by what came first: a second signal may come when nothing runs any more.
    drained = not router.running
    if not drained:
        record.note(f"{router.running} requests were ended before their time")
    await keeper.ask()
    if ends.at_once.is_set():
        replicas.kill()
    await replicas.end()
    await asyncio.wait({closing}, timeout=LAST)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    return drained


async def _emptied(router: Router) -> None:
    while router.running:
        await asyncio.sleep(0.02)


async def _until(stop: asyncio.Event, *others: Any) -> int:
    """Wait for an event or for one of several awaitables: 0 for the event, else which it was.

    Raises what the awaitable raises. Those that were not waited for to their end are cancelled,
    unless they are futures of somebody else's.
    """
    tasks = [asyncio.ensure_future(one) for one in (stop.wait(), *others)]
    owned = [task for task, one in zip(tasks, (None, *others), strict=True) if task is not one]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in owned:
            if not task.done():
                task.cancel()
    for number, task in enumerate(tasks):
        if task in done and number:
            task.result()
            return number
    return 0


async def _connect(path: Path, token: str) -> tuple[DriverConnection, dict[str, Any]]:
    from hocket.serving.front.client import ReplicaClient

    client = await ReplicaClient.connect(path, token)
    return client, client.capacity


def _address(door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _open(
    server: PreparedServer,
    router: Router,
    replicas: ReplicaSet,
    templates: Renderer | None,
    doors: tuple[socket.socket, socket.socket],
) -> Front:
    """Begin to answer on the sockets: that it is not ready, as long as no replica is."""
    from hocket.serving.front.words import TokenizerFace
    from hocket.serving.http.server import Front
    from hocket.serving.http.service import HttpService, ServedModel
    from hocket.serving.http.settings import HttpSettings

    options = server.options
    assert options.max_model_len is not None
    assert options.max_num_seqs is not None
    places = options.max_num_seqs + options.max_queue
    service = HttpService(
        router,
        TokenizerFace(server.words.to_json()),
        ServedModel(
            name=server.name,
            max_model_len=options.max_model_len,
            vocab_size=server.source.dimensions.vocab_size,
            stop=server.stop,
            created=int(time.time()),
            sampling=server.sampling,
        ),
        templates,
        HttpSettings(
            host=options.host,
            keys=server.keys,
            deadline=options.deadline,
            # More answers than run and wait at once would be sent away however often they come.
            max_answers=min(HttpSettings.max_answers, server.layout.dp * places),
        ),
        room=replicas.room,
        missing=replicas.missing,
    )
    return await Front.open(service, *doors)
