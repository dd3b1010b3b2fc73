"""A run folder that cannot be made: the error names a place where it can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.jobs import writable
from hocket.spec.errors import RunFolderError
from hocket.spec.run import RunFolder

Denied = Callable[..., None]


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Denied:
    """Folders that this user may not write to, root included."""

    def deny(*folders: Path) -> None:
        monkeypatch.setattr(writable.os, "access", lambda path, mode: Path(path) not in folders)

    return deny


def test_the_hint_is_a_folder_that_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: Denied
) -> None:
    work, home, temporary = (tmp_path / name for name in ("work", "home", "temporary"))
    for folder in (work, home, temporary):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(temporary))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folders, hint in (
        ((elsewhere,), "--run runs/first"),
        ((elsewhere, work), f"--run {home}/runs/first"),
        ((elsewhere, work, home), f"--run {temporary}/runs/first"),
        (
            (elsewhere, work, home, temporary),
            "--run FOLDER in a volume that this user may write to",
        ),
    ):
        denied(*folders)
        with pytest.raises(RunFolderError, match="elsewhere cannot be written to") as caught:
            writable.require_writable(RunFolder(elsewhere / "deep" / "run"), "runs/first")
        assert caught.value.hint == hint
    denied(work)
    writable.require_writable(RunFolder(elsewhere / "deep" / "run"), "runs/first")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file, not a folder"):
        writable.require_writable(RunFolder(tmp_path / "file" / "run"), "runs/first")
