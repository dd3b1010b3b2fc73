"""The copy of a finished model: whole or not there, with the disk's own error."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from hocket.jobs.export import _copy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "nested").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "nested" / "code.py").write_text("x = 1\n")
    return folder


def test_the_whole_folder_arrives(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "out" / "copy"
    _copy(model, to)
    assert (to / "config.json").read_text() == "{}"
    assert (to / "nested" / "code.py").read_text() == "x = 1\n"
    assert [path.name for path in to.parent.iterdir()] == ["copy"]


def test_a_full_disk_leaves_nothing_and_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, to: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(to))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left") as raised:
        _copy(model, tmp_path / "copy")
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
