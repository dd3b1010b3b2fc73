"""A full disk is told with the file that it refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.spec.files import named, write_text

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


@needs_full
def test_a_disk_that_is_full_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    (tmp_path / f".{file.name}.{os.getpid()}").symlink_to(FULL)
    with pytest.raises(OSError, match=str(file)) as refused:
        write_text(file, "text")
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(file))
    assert not list(tmp_path.iterdir()), "no part of it stays"


@needs_full
def test_the_command_line_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    (tmp_path / f".{file.name}.{os.getpid()}").symlink_to(FULL)
    monkeypatch.setattr("hocket.jobs.ledger.read_all_entries", lambda: write_text(file, "text"))
    assert main(["report", "--history"]) == 2
    assert capsys.readouterr().err == f"hocket: {file}: No space left on device\n"


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing, named(tmp_path / "other"):
        (tmp_path / "none").read_text()
    assert missing.value.filename == str(tmp_path / "none")
    with pytest.raises(ConnectionResetError) as lost, named(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    assert lost.value.filename is None
    with pytest.raises(OSError, match="first") as inner, named("second"), named("first"):
        raise OSError(errno.ENOSPC, "full")
    assert inner.value.filename == "first"
