"""Weights change under load: no request is lost, and what cannot be loaded changes nothing."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import hocket
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


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_no_request_is_lost(where: Path, tmp_path: Path, layout: str) -> None:  # noqa: F811
    model(tmp_path / "other")
    codes: list[int] = []
    over = threading.Event()

    def ask(address: str) -> None:
        while not over.is_set():
            code, answer = post(address, max_tokens=8, ignore_eos=True)
            codes.append(code if answer.get("usage", {}).get("completion_tokens") == 8 else -1)

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        threads = [threading.Thread(target=ask, args=(address,)) for _ in range(3)]
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
            thread.join(30)

    visitor = Visitor(visit)
    hocket.serve(
        where, layout=layout, run=tmp_path / "run", on_event=visitor, reload_dir=str(tmp_path),
        **SMALL,
    )  # fmt: skip
    visitor.over()
    assert set(codes) == {200}
    assert len(codes) > 6
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
        end = time.monotonic() + 20
        while post(address)[0] != 200:
            assert time.monotonic() < end

    visitor = Visitor(visit)
    hocket.serve(where, run=tmp_path / "run", on_event=visitor, reload_dir=str(inside), **SMALL)
    visitor.over()
    assert "replica 0 starts with the weights it had" in visitor.said()


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
