"""Ranks of a replica without a model: rank 0 speaks as a driver does, the others wait for it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any

from hocket.launch import RankContext
from hocket.serving.front.frames import HELLO, MAX_COMMAND, FrameReader, decode_frame, encode
from hocket.spec.errors import ModelError

SLOW = 0.01
"""Seconds of a token."""


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Answer every request with tokens 0, 1, 2 ...; what else happens, `payload` says.

    `fail`: raise before being ready. `dies`: every rank of a later life ends at once. `hold`: a
    later life begins only when `pids` holds a file `go`. Process ids are left under `pids`, or
    in the run folder, and `asked-N` where a request for N tokens has come.
    """
    folder = _folder(payload)
    name = f"{payload['replica']}-{payload['attempt']}-{context.rank}"
    (folder / name).write_text(str(os.getpid()))
    if "bad-weights" in payload.get("spec", ""):
        raise ModelError("these weights cannot be served")
    if payload.get("fail"):
        raise ModelError("the model cannot be served", hint="another one")
    if payload.get("dies") and payload["attempt"]:
        os.kill(os.getpid(), signal.SIGKILL)
    while payload.get("hold") and payload["attempt"] and not (folder / "go").exists():
        time.sleep(0.01)
    if context.rank:
        _wait(context, payload)
    else:
        _drive(context, payload)


def held(context: RankContext, payload: dict[str, Any]) -> None:
    """As `main` with `hold`."""
    main(context, {**payload, "hold": True})


def planned_once(context: RankContext, payload: dict[str, Any]) -> None:
    """A rank with a model, whose later lives may not look for its plan."""
    from hocket.models import plan_cache
    from hocket.ranks import serving

    def found_again(*_: Any, **__: Any) -> None:
        raise AssertionError("a later life looks for the plan of its model")

    if payload["attempt"]:
        plan_cache.plan_for = found_again  # type: ignore[assignment]
    serving.main(context, payload)


def never(context: RankContext, payload: dict[str, Any]) -> None:
    """Never be ready."""
    (_folder(payload) / f"{payload['replica']}-{payload['attempt']}-{context.rank}").touch()
    while True:
        context.beat()
        time.sleep(0.02)


def _folder(payload: dict[str, Any]) -> Path:
    return Path(payload.get("pids") or payload["run"])


def _wait(context: RankContext, payload: dict[str, Any]) -> None:
    done = _folder(payload) / f"{payload['replica']}-{payload['attempt']}-left"
    while not done.exists():
        context.beat()
        time.sleep(0.02)


def _drive(context: RankContext, payload: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(payload["socket"])
        door.listen()
        door.settimeout(60)
        parent, _ = door.accept()
    name = f"{payload['replica']}-{payload['attempt']}"
    token, _ = HELLO.unpack(parent.recv(HELLO.size, socket.MSG_WAITALL))
    assert token == bytes.fromhex(payload["token"])
    context.emit({"event": "begun"})
    ready = {"event": "ready", "num_blocks": 64, "cache_tokens": 1024}
    parent.sendall(encode(ready))
    reader, selector = FrameReader(MAX_COMMAND), selectors.DefaultSelector()
    selector.register(parent, selectors.EVENT_READ)
    running: dict[str, list[int]] = {}
    draining = False
    while True:
        for _ in selector.select(SLOW):
            data = parent.recv(1 << 16)
            if not data:
                return
            for message in map(decode_frame, reader.feed(data)):
                match message["do"]:
                    case "add":
                        request = message["request"]
                        running[request["id"]] = [0, request["sampling"]["max_new_tokens"]]
                        (
                            _folder(payload) / f"asked-{request['sampling']['max_new_tokens']}"
                        ).touch()
                    case "abort":
                        for one in message["ids"]:
                            running.pop(one, None)
                    case "stats":
                        measured = {
                            "decode": [{"batch": 1, "context": 9, "seconds": 0.01, "count": 3}],
                            "prefill": [],
                            "steps": 3,
                        }
                        parent.sendall(encode({"event": "stats", "stats": {"running": len(running)},
                                               "measured": measured}))  # fmt: skip
                    case "drain":
                        draining = True
                    case "stop":
                        left = f"{payload['replica']}-{payload['attempt']}-left"
                        (_folder(payload) / left).touch()
                        return
        outputs = []
        for name, state in list(running.items()):
            state[0] += 1
            finish = "length" if state[0] >= state[1] else None
            outputs.append({"id": name, "tokens": [state[0] - 1], "finish_reason": finish})
            if finish:
                del running[name]
        if outputs:
            parent.sendall(encode({"event": "outputs", "outputs": outputs}))
        if draining and not running:
            draining = False
            parent.sendall(encode({"event": "drained"}))
        context.beat()


def refuse(context: RankContext, payload: dict[str, Any]) -> None:
    """A replica that cannot be."""
    raise ModelError("the model cannot be served", hint="another one")
