"""Reload: other weights for a running server, one replica after the other, without a lost request.

    POST /v1/models/reload, SIGHUP -> the weights are found and fit -> for each replica:
        no new request -> those it has end -> its ranks leave, and start again with the new weights

Replicas that are not at it answer meanwhile. Where there is only one, requests wait for it. An
answer is computed by one set of weights from its first token to its last. Where the first replica
cannot start with the new weights, it starts with the old ones, and the others keep theirs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, ModelError, OptionError

if TYPE_CHECKING:
    from hocket.jobs.serving.replicas import ReplicaSet
    from hocket.jobs.serving.request import PreparedServer

_FREE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of a configuration that change nothing of what is computed."""


def folder_of(server: PreparedServer) -> Path | None:
    """`--reload-dir`, resolved; None where it was not given.

    Raises:
        OptionError: it is not a folder.
    """
    given = server.options.reload_dir
    if given is None:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise OptionError(f"reload_dir is {given}; there is no such folder", hint="--reload-dir .")
    return folder.resolve()


def on_hangup(call: Callable[[], None]) -> None:
    """Call it at SIGHUP instead of ending the server."""
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, call)


class Reload:
    """Loads other weights into all replicas.

    Args:
        server: as it was started.
        replicas: of it.
        folder: models below it may be loaded.
        say: hears what happens, in sentences.
    """

    def __init__(
        self, server: PreparedServer, replicas: ReplicaSet, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.server, self.replicas, self.folder, self.say = server, replicas, folder, say
        self._spec = server.spec(replica=True)
        self._under_way = False
        self._tasks: set[asyncio.Future[Any]] = set()

    async def __call__(self, path: str | None = None) -> dict[str, Any]:
        """Load the weights of a model; None: those that are served, read again.

        Returns:
            `path`, `replicas` that have them, `seconds`.

        Raises:
            OptionError: a path outside of the folder. ModelError: no weights, or of another model.
            ApiError: 409, a reload is under way.
            HocketError: the first replica did not start with them, and has started with the old.
        """
        from hocket.serving.http.errors import ApiError

        if self._under_way:
            raise ApiError(409, "a reload of the weights is under way", retry_after=5.0)
        self._under_way = True
        task = asyncio.ensure_future(self._load(path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)  # a client that hangs up does not leave it half done

    def signalled(self) -> None:
        """SIGHUP: the weights that are served, read again."""

        from hocket.serving.http.errors import ApiError

        async def load() -> None:
            try:
                await self()
            except (HocketError, ApiError) as error:
                self.say(f"the weights are not reloaded: {error}")

        task = asyncio.ensure_future(load())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, path: str | None) -> dict[str, Any]:
        began = time.monotonic()
        try:
            spec = self._spec if path is None else await asyncio.to_thread(self._found, path)
            self.say(f"loading the weights of {spec.weights}")
            count = await self.replicas.reload(
                {**self.replicas.world.payload, "spec": spec.to_json()}
            )
            self._spec = spec
        finally:
            self._under_way = False
        seconds = time.monotonic() - began
        self.say(f"{count} replicas serve the weights of {spec.weights} after {seconds:.1f} s")
        return {"path": spec.weights, "replicas": count, "seconds": round(seconds, 3)}

    def _found(self, path: str) -> Any:
        """The spec with the weights of the model at a path, which must be one like that served."""
        from hocket.models.source import resolve_model
        from hocket.models.weight_headers import headers

        given = self.folder / Path(path).expanduser()
        where = Path(os.path.realpath(given))
        if self.folder not in (where, *where.parents):
            raise OptionError(
                f"path is {path!r}, outside of the folder that --reload-dir names",
                hint=f"a model below {self.folder}",
            )
        if not where.is_dir():
            raise OptionError(f"path is {path!r}; there is no such folder below {self.folder}")
        source = resolve_model(str(where), trust_remote_code=False)
        if source.weights is None:
            raise ModelError(f"{where} holds no weights")
        own, other = (
            {key: value for key, value in config.items() if key not in _FREE}
            for config in (self._spec.config, source.config)
        )
        if own != other:
            keys = sorted(
                key for key in own.keys() | other.keys() if own.get(key) != other.get(key)
            )
            raise ModelError(
                f"{where} is another model than the one that is served: {', '.join(keys[:5])} "
                "differ"
            )
        headers(source.weights)  # that they are whole
        return dataclasses.replace(
            self._spec,
            model=str((source.directory or source.weights).resolve()),
            weights=str(source.weights.resolve()),
        )
