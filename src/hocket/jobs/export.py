"""The export: a run's model as an ordinary Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hocket.spec.errors import RunFolderError
from hocket.spec.run import RunFolder


def export(run: str | os.PathLike[str], to: str | os.PathLike[str]) -> Path:
    """Write the newest state of a run as a directory that transformers loads.

    That is its last checkpoint or, where the run went on beyond it or has none, the model that the
    run wrote at its end.

    Raises:
        RunFolderError: no run is there, or it has neither.
        OptionError: `to` holds something that would be lost.
        CheckpointError: the checkpoint is damaged.
    """
    from hocket.models.source import of_run
    from hocket.spec import checkpoint
    from hocket.training.export import ModelFiles, export_checkpoint, refuse_occupied

    folder, to = RunFolder(run), Path(to)
    spec = folder.load()
    refuse_occupied(to)
    source = of_run(spec)
    last = None
    if checkpoint.checkpoints(folder.checkpoints):
        last, _, _ = checkpoint.newest_whole(folder.checkpoints)
    finished = folder.model / "config.json"
    if finished.exists() and (
        last is None or finished.stat().st_mtime >= (last / checkpoint.MANIFEST).stat().st_mtime
    ):
        if folder.model.resolve() != to.resolve():
            _copy(folder.model, to)
        return to
    if last is None:
        raise RunFolderError(
            f"{folder.path} holds neither a checkpoint nor a finished model",
            hint="train with --save-every, or let the run reach its end",
        )
    files = ModelFiles(
        config=spec.config,
        directory=source.directory,
        tokenizer=folder.data if (folder.data / "tokenizer.json").exists() else None,
        code=source.code,
    )
    return export_checkpoint(last, to, files)


def _copy(model: Path, to: Path) -> None:
    """Copy a directory so that it appears when it is complete; the disk's own error, if any."""
    aside = to.with_name(f".{to.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        for source in sorted(model.iterdir()):
            # copytree would collect the errors of all files into one that names no cause.
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, aside / source.name)
        if to.exists():
            shutil.rmtree(to)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
