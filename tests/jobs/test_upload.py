"""Checkpoints are uploaded while a run trains, and a run continues from where they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.runtime import upload as runtime_upload
from hocket.runtime.upload import Remote, Uploader
from hocket.spec import checkpoint as words
from hocket.spec.errors import OptionError
from hocket.spec.run import RunFolder, TrainOptions
from tests.support.runs import Whole, job, losses, weights

pytest.importorskip("fsspec")
pytestmark = [
    pytest.mark.train,
    pytest.mark.ranks,
    pytest.mark.usefixtures("runs"),
    pytest.mark.timeout(240),
]


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_upload, "PAUSE", 0.01)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL in a small S3-compatible server on loopback."""
    s3fs = pytest.importorskip("s3fs")
    server_of = pytest.importorskip("moto.server")
    server = server_of.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"), ("AWS_DEFAULT_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("runs")
    yield "s3://runs/one"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_run_whose_folder_is_lost_continues_from_its_upload(
    tmp_path: Path, whole: Whole, place: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("bucket") if place == "bucket" else str(tmp_path / "slow" / "run")
    whole(tmp_path, "whole", "dp2")
    options: dict[str, Any] = {"upload": url, "keep_checkpoints": 1}
    term = {"kind": "term", "rank": 0, "phase": "step", "step": 6}
    # Ranks agree to stop a few times a second; at full speed the run would be over by then.
    slow = {"kind": "slow", "rank": 0, "phase": "input", "step": 1, "seconds": 0.25}
    stopped = job(tmp_path, "run", "dp2", [term, slow], **options)
    assert stopped.stopped
    remote = Remote(url)
    assert remote.checkpoints() == [f"step-{stopped.steps:06d}"]
    shutil.rmtree(tmp_path / "run")
    notes: list[str] = []
    job(tmp_path, "run", "dp2", notes=notes, **options)
    assert any(f"is from {url}" in note for note in notes)
    assert weights(tmp_path, "run") == weights(tmp_path, "whole")
    assert losses(tmp_path, "run") == losses(tmp_path, "whole")
    assert remote.checkpoints() == ["step-000012"]
    got = tmp_path / "got"
    remote.fetch("", got)
    model = "model/model.safetensors"
    assert (got / model).read_bytes() == (tmp_path / "run" / model).read_bytes()
    remote.fetch("checkpoints/step-000012", got / "step-000012")
    assert words.verify_checkpoint(got / "step-000012").step == 12
    assert not [*(tmp_path / "run" / "checkpoints").glob(".upload-*")]
    shutil.rmtree(tmp_path / "run")
    assert job(tmp_path, "run", "dp2", **options).steps == 12  # finished: nothing is left to do


def test_an_upload_that_fails_costs_that_upload(
    tmp_path: Path, whole: Whole, monkeypatch: Any
) -> None:
    whole(tmp_path, "whole", "dp2")
    put = Remote.put

    def refuse(self: Remote, file: Path, name: str) -> None:
        if "step-000004" in name:
            raise OSError(28, "No space left on device")
        put(self, file, name)

    monkeypatch.setattr(Remote, "put", refuse)
    notes: list[str] = []
    url = str(tmp_path / "slow")
    job(tmp_path, "run", "dp2", notes=notes, upload=url, keep_checkpoints=9)
    assert weights(tmp_path, "run") == weights(tmp_path, "whole")
    remote = Remote(url).checkpoints()
    assert remote[0] == "step-000012"
    assert "step-000004" not in remote
    refused = [note for note in notes if "step-000004 was not uploaded" in note]
    assert all("No space left on device; training continues" in note for note in refused)


def checkpoint(folder: Path, step: int) -> Path:
    path = words.step_folder(folder, step)
    path.mkdir(parents=True)
    for name in ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"):
        (path / name).write_text(f"{name} of {step}")
    return path


def test_half_an_upload_is_not_a_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    folder = RunFolder(tmp_path / "run")
    checkpoint(folder.checkpoints, 1)
    for allowed in range(6):
        remote = Remote(str(tmp_path / f"slow-{allowed}"))
        left, put = [allowed], remote.put

        def some(file: Path, name: str, left: list[int] = left, put: Any = put) -> None:
            if not left[0]:
                raise OSError("cut")
            left[0] -= 1
            put(file, name)

        monkeypatch.setattr(remote, "put", some)
        uploader = Uploader(remote, folder, TrainOptions())
        uploader.saved(folder.checkpoints / "step-000001")
        uploader.finish()
        whole = allowed >= 3
        assert remote.checkpoints() == ["step-000001"] * whole
        assert uploader.notes.empty() == whole
        assert not [*folder.checkpoints.glob(".upload-*")]


def test_what_is_kept_there_is_what_is_kept_here(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    remote = Remote(str(tmp_path / "slow"))
    for step in (2, 4, 6, 8, 10):
        uploader = Uploader(remote, folder, TrainOptions(keep_checkpoints=2, keep_every=4))
        path = checkpoint(folder.checkpoints, step)
        uploader.saved(path)
        shutil.rmtree(path)  # deleted here before it is uploaded
        uploader.finish()
    names = [f"step-{step:06d}" for step in (10, 8, 4)]
    assert remote.checkpoints() == names


def test_a_mount_that_vanished_is_not_written_to(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    remote = Remote(str(tmp_path / "slow"))
    remote._device = -1  # as if another file system were there now
    uploader = Uploader(remote, folder, TrainOptions())
    uploader.saved(checkpoint(folder.checkpoints, 2))
    uploader.finish()
    assert "is not the file system that it was" in uploader.notes.get()
    assert not [*(tmp_path / "slow").iterdir()]


@pytest.mark.parametrize("url", ["nowhere://bucket/run", "/proc/run"])
def test_a_place_that_cannot_be_written_is_rejected(tmp_path: Path, url: str) -> None:
    with pytest.raises(OptionError, match="--upload"):
        job(tmp_path, "run", "dp2", upload=url)
    assert not (tmp_path / "run" / "run.json").exists()
