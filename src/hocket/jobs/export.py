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
            shutil.copytree(folder.model, to, dirs_exist_ok=True)
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
