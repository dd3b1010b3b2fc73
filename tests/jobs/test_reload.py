"""Weights change under load: no request is lost, and what cannot be loaded changes nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.jobs.serving import server as job
from hocket.spec.errors import OptionError
from tests.jobs.served_model import CONFIG, model
from tests.jobs.test_serve import SMALL, Visitor, asked, gone, post, where  # noqa: F401  a fixture

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def reload(address: str, **body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{address}/v1/models/reload",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def readiness(address: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_without_a_replica_that_answers_a_server_is_not_ready(
    where: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two replicas, killed one after the other: the first leaves it ready."""
    run = tmp_path / "run"

    def end(address: str, replica: int) -> tuple[int, dict[str, Any]]:
        os.kill(int((run / f"{replica}-0-0").read_text()), signal.SIGKILL)
        while "missing" not in (found := readiness(address)[1]) or not any(
            one["replica"] == replica for one in found["missing"]
        ):
            time.sleep(0.005)
        return readiness(address)

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        code, body = end(address, 1)
        assert (code, body["status"]) == (200, "ready")
        assert [one["replica"] for one in body["missing"]] == [1]
        code, body = end(address, 0)
        assert (code, body["status"]) == (503, "starting")
        assert [one["replica"] for one in body["missing"]] == [0, 1]
        (run / "go").touch()
        while readiness(address) != (200, {"status": "ready"}):
            time.sleep(0.02)

    visitor = Visitor(visit)
    monkeypatch.setattr(job, "ENTRY", "tests.jobs.replica_cases:held")
    hocket.serve(where, layout="dp2", run=run, on_event=visitor, **SMALL)
    visitor.over()


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_no_request_is_lost(where: Path, tmp_path: Path, layout: str) -> None:  # noqa: F811
    model(tmp_path / "other")
    codes: list[int] = []
    ready: list[tuple[int, dict[str, Any]]] = []
    over = threading.Event()

    def look(address: str) -> None:
        while not over.is_set():
            ready.append(readiness(address))
            time.sleep(0.01)

    def ask(address: str) -> None:
        while not over.is_set():
            code, answer = post(address, max_tokens=8, ignore_eos=True)
            codes.append(code if answer.get("usage", {}).get("completion_tokens") == 8 else -1)

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        threads = [threading.Thread(target=what, args=(address,)) for what in (ask, ask, ask, look)]
        for thread in threads:
            thread.start()
        long = threading.Thread(
            target=lambda: codes.append(post(address, max_tokens=100, ignore_eos=True)[0])
        )
        long.start()
        asked(tmp_path / "run", 100)
        for path in ("other", None, "model"):
            code, answer = reload(address, **({"path": path} if path else {}))
            assert code == 200, answer
            assert answer["replicas"] == int(layout[2])
            assert (
                Path(answer["path"]).parent.name in ("other", "model") or Path(answer["path"]).name
            )
        over.set()
        for thread in (*threads, long):
            thread.join(60)

    visitor = Visitor(visit)
    hocket.serve(
        where, layout=layout, run=tmp_path / "run", on_event=visitor, reload_dir=str(tmp_path),
        **SMALL,
    )  # fmt: skip
    visitor.over()
    assert set(codes) == {200}
    assert len(codes) > 6
    assert {code for code, _ in ready} == {200}
    replaced = [{"replica": number, "state": "reloading"} for number in range(int(layout[2]))]
    assert ready[0][1] == {"status": "ready"}
    assert {"status": "ready", "missing": replaced[:1]} in [body for _, body in ready]
    assert all(len(body.get("missing", ())) <= 1 for _, body in ready)
    assert "replica 0 died" not in visitor.said()
    lives = sorted(file.name for file in (tmp_path / "run").glob("0-*-0"))
    assert lives == ["0-0-0", "0-1-0", "0-2-0", "0-3-0"]
    assert gone(tmp_path / "run")


def test_what_cannot_be_loaded_changes_nothing(where: Path, tmp_path: Path) -> None:  # noqa: F811
    inside = tmp_path / "inside"
    model(inside / "bad-weights")
    model(inside / "wider")
    (inside / "wider" / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64}))
    (inside / "empty").mkdir()
    (inside / "link").symlink_to(where)

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        for path, code, text in (
            ("../model", 400, "outside of the folder"), (str(where), 400, "outside of the folder"),
            ("link", 400, "outside of the folder"), ("none", 400, "no such folder"),
            ("wider", 400, "another model than the one that is served: hidden_size differ"),
        ):  # fmt: skip
            found, answer = reload(address, path=path)
            assert found == code, (path, answer)
            assert text in answer["error"]["message"]
        assert reload(address, path="empty")[0] == 400
        assert reload(address, path=3)[0] == 400
        assert reload(address, folder="x")[0] == 400
        code, answer = reload(address, path="bad-weights")
        assert code == 400, answer
        assert "cannot be served" in answer["error"]["message"]
        end = time.monotonic() + 60
        while post(address)[0] != 200:
            assert time.monotonic() < end

    visitor = Visitor(visit)
    hocket.serve(where, run=tmp_path / "run", on_event=visitor, reload_dir=str(inside), **SMALL)
    visitor.over()
    assert "replica 0 starts with the weights it had" in visitor.said()


def test_the_plan_of_a_model_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks, which would fail if they looked for it again; tokens of plain transformers."""
    from benchmarks.serve.faults import PROMPTS, ask, models

    answers = models(tmp_path)
    monkeypatch.setattr(job, "ENTRY", "tests.jobs.replica_cases:planned_once")

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        for name in ("a", "b", "a"):
            if name != "a" or found:
                assert reload(address, path=name)[0] == 200
            for prompt in PROMPTS:
                reply = ask(int(address.rpartition(":")[2]), prompt, stream=False)
                assert reply.status == 200, reply.text
                found.append((name, prompt, reply.tokens))

    found: list[tuple[str, str, list[int]]] = []
    visitor = Visitor(visit)
    hocket.serve(
        tmp_path / "a", layout="tp2", run=tmp_path / "run", on_event=visitor,
        reload_dir=str(tmp_path), **SMALL,
    )  # fmt: skip
    visitor.over()
    assert len(found) == 3 * len(PROMPTS)
    for name, prompt, tokens in found:
        assert tokens == answers[name][prompt]


def test_without_the_flag_nothing_is_loaded(where: Path, tmp_path: Path) -> None:  # noqa: F811
    visitor = Visitor(lambda event: codes.append(reload(event["address"])[0]))
    codes: list[int] = []
    hocket.serve(where, run=tmp_path / "run", on_event=visitor, **SMALL)
    visitor.over()
    assert codes == [403]
    with pytest.raises(OptionError, match="there is no such folder"):
        hocket.serve(where, reload_dir=str(tmp_path / "none"), **SMALL)


def test_faults_from_a_seed_give_no_wrong_token() -> None:
    """Real ranks, references from plain transformers: each kind once."""
    from benchmarks.serve.faults import main as faults

    assert faults(["--faults", "5", "--seed", "1", "--clients", "3"]) == 0
