"""The line that installs an extra names what this hocket was installed from, and by what."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.spec import install
from hocket.spec.install import install_line

SOURCE = Path(install.__file__).parents[1]
CLONE = {"url": "file:///home/a%20b/hocket", "dir_info": {"editable": True}}
COMMIT = {"vcs_info": {"vcs": "git", "commit_id": "4f2a"}}


@pytest.fixture(autouse=True)
def afresh() -> Any:
    install._noted.cache_clear()
    yield
    install._noted.cache_clear()


def noted(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    found = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)


@pytest.mark.parametrize(
    ("url", "arguments"),
    [
        (CLONE, ["-e", "/home/a b/hocket[train]"]),
        ({"url": "file:///src/hocket", "dir_info": {}}, ["/src/hocket[train]"]),
        (
            {"url": "file:///dist/hocket-0.1.0-py3-none-any.whl", "archive_info": {}},
            ["/dist/hocket-0.1.0-py3-none-any.whl[train]"],
        ),
        (
            {"url": "https://example.org/hocket.git", **COMMIT},
            ["hocket[train] @ git+https://example.org/hocket.git@4f2a"],
        ),
        (
            {"url": "https://example.org/hocket-0.1.0-py3-none-any.whl", "archive_info": {}},
            ["hocket[train] @ https://example.org/hocket-0.1.0-py3-none-any.whl"],
        ),
        (None, ["hocket[train]"]),  # from an index
        ([], ["hocket[train]"]),
        ({"url": "https://example.org/hocket.git", "vcs_info": {}}, ["hocket[train]"]),
    ],
)
def test_it_is_installed_again_from_where_it_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: Any, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    noted(monkeypatch, None if url is None else json.dumps(url))
    assert shlex.split(install_line("train")) == ["pip", "install", *arguments]


def test_a_file_that_is_not_json_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noted(monkeypatch, "{")
    assert install_line("train") == "pip install 'hocket[train]'"


def test_a_clone_that_was_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    clone = SOURCE.parents[1]
    wanted = f"-e {clone}[lora]" if (clone / "pyproject.toml").exists() else "hocket[lora]"
    assert shlex.split(install_line("lora"))[2:] == wanted.split(" ", 1)


@pytest.mark.parametrize(
    ("receipt", "line"),
    [
        ("uv-receipt.toml", "uv tool install --force 'hocket[train]'"),
        ("pipx_metadata.json", "pipx install --force 'hocket[train]'"),
        ("pyvenv.cfg", "pip install 'hocket[train]'"),
    ],
)
def test_the_tool_that_made_the_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str, line: str
) -> None:
    (tmp_path / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    noted(monkeypatch, None)
    assert install_line("train") == line


def test_no_message_writes_that_line_itself() -> None:
    found = [
        path.name for path in SOURCE.rglob("*.py") if "install 'hocket" in path.read_text("utf-8")
        or 'install "hocket' in path.read_text("utf-8")
    ]  # fmt: skip
    assert not found
