"""What `hocket serve` prints when it is ready: a request that can be pasted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.serve import _ready


def event(**more: Any) -> dict[str, Any]:
    said = {"seconds": 1.0, "model": "m", "layout": "dp1", "metrics": "http://h:2", "run": "r"}
    return {**said, "address": "http://h:1", "replicas": [], **more}


@pytest.mark.parametrize("text", ["long-secret-1\n", "# mine\n\nada long-secret-1\nbob other-2\n"])
def test_the_printed_request_sends_a_key_and_does_not_show_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "the keys"
    file.write_text(text)
    said = _ready(event(api_key_file=str(file)))
    assert "long-secret" not in said
    header = re.search(r'-H ("Authorization: .*") -d', said)
    assert header is not None
    sent = subprocess.run(
        ["bash", "-c", f"printf %s {header[1]}"], capture_output=True, text=True, timeout=100
    )
    assert sent.stdout == "Authorization: Bearer long-secret-1"


def test_without_keys_none_is_sent() -> None:
    assert "Authorization" not in _ready(event(api_key_file=None))
