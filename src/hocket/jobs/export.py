"""The export: a run's model as an ordinary Hugging Face directory, here or on the Hub."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hocket
from hocket.jobs.prepare import free_name
from hocket.spec.errors import ModelError, OptionError, RunFolderError
from hocket.spec.files import MALFORMED, parse_json
from hocket.spec.run import RunFolder, RunSpec


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Where an export went on the Hub.

    Attributes:
        page: its address. num_bytes: of its files.
    """

    page: str
    num_bytes: int


def check_push(name: str) -> None:
    """Reject a push that cannot succeed before the work that it follows.

    Raises:
        OptionError: the name is not `ORG/NAME`, the Hub is switched off, or there is no token.
    """
    from hocket.models import push as pushing

    pushing.checked_repo(name)


def push_run(
    run: str | os.PathLike[str],
    name: str,
    *,
    to: str | os.PathLike[str] | None = None,
    merge: bool = False,
    overwrite: bool = False,
    private: bool = False,
    trust_remote_code: bool = False,
) -> Pushed:
    """Export a run as `export_run` does and upload the directory to the Hub, with a model card.

    Args:
        name: `ORG/NAME`; made if it is not there.
        to: the directory to make; None: one that is removed afterwards.
        private: whether a repository that is made is private. False: the Hub's default, which is
            public unless the organization says otherwise.

    Raises:
        OptionError: there is no token, or it may not write there.
        HocketError: as `export_run`.
    """

    from hocket.models import push as pushing

    repo = pushing.checked_repo(name)
    folder = RunFolder(run)
    spec = folder.load(trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="hocket-push-") as made:
        made_at = export_run(
            run,
            Path(made) / "model" if to is None else to,
            merge=merge,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
        )
        adapter = not (made_at / "config.json").exists()
        text = card(folder, spec, repo.id, adapter=adapter)
        size = sum(file.stat().st_size for file in made_at.rglob("*") if file.is_file())
        page = pushing.push_folder(made_at, repo, card=text, private=private or None)
    return Pushed(page=page, num_bytes=size)


def export_run(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    merge: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write the newest state of a run as a directory that transformers loads; of a run with LoRA,
    its adapter as peft loads it or, with `merge`, the base with the adapter added.

    That is its last checkpoint or, where the run went on beyond it or has none, the model that the
    run wrote at its end.

    Args:
        run: the run folder.
        to: the directory to make.
        merge: add the adapter to the base.
        overwrite: replace a model (or adapter) that `to` holds. Other directories never are.
        trust_remote_code: run code of the model's own; whatever the run says of it is not used.

    Raises:
        RunFolderError: no run is there, it has neither, or another process writes where `to` is.
        OptionError: `to` holds something that would be lost, or there is nothing to merge.
        ModelError: the model brings its own code, and `trust_remote_code` is not given.
        CheckpointError: the checkpoint is damaged.
    """
    from hocket.jobs import lock

    with lock.export_locked(Path(to)):
        return _export(
            RunFolder(run), Path(to), merge=merge, overwrite=overwrite, trust=trust_remote_code
        )


def _export(folder: RunFolder, to: Path, *, merge: bool, overwrite: bool, trust: bool) -> Path:
    from hocket.models.source import run_source
    from hocket.spec import checkpoint
    from hocket.training.export import ModelFiles, export_checkpoint, refuse_occupied

    spec = folder.load(trust_remote_code=trust)
    if not overwrite and to.is_dir() and any(to.iterdir()) and to.resolve() not in _own(folder):
        raise OptionError(
            f"{to} is not empty; an export replaces what is there",
            hint=f"--to {free_name(to)}, or --overwrite if it holds a model that may be lost",
        )
    if spec.options.lora_rank is not None:
        return _adapted(folder, spec, to, merge=merge)
    if merge:
        raise OptionError(
            f"{folder.path} trained the model itself: there is no adapter to merge",
            hint=f"hocket export {folder.path} --to {to}",
        )
    refuse_occupied(to)
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
        raise _unfinished(folder)
    source = run_source(spec)
    files = ModelFiles(
        config=spec.config,
        directory=source.directory,
        tokenizer=folder.data if (folder.data / "tokenizer.json").exists() else None,
        code=source.code,
    )
    return export_checkpoint(last, to, files)


def _adapted(folder: RunFolder, spec: RunSpec, to: Path, *, merge: bool) -> Path:
    from hocket.models import lora
    from hocket.models.source import fetch_again, require_own_base, resolve_model, run_source
    from hocket.spec import checkpoint
    from hocket.training import adapter, export

    (export if merge else adapter).refuse_occupied(to)
    last = None
    if checkpoint.checkpoints(folder.checkpoints):
        last, _, _ = checkpoint.newest_whole(folder.checkpoints)
    finished = folder.adapter / adapter.CONFIG
    if last is None and not finished.exists():
        raise _unfinished(folder)
    stays = finished.exists() and (
        last is None or finished.stat().st_mtime >= (last / checkpoint.MANIFEST).stat().st_mtime
    )
    if not merge:
        if not stays:
            assert last is not None
            return adapter.adapter_of_checkpoint(last, to, spec)
        if folder.adapter.resolve() != to.resolve():
            _copy(folder.adapter, to)
        return to
    if spec.weights is None:
        raise RunFolderError(f"{folder.spec_file} names no weights that its adapter belongs to")
    fetch_again(spec)
    require_own_base(folder, spec)
    base = resolve_model(
        run_source(spec).weights or spec.weights, trust_remote_code=spec.options.trust_remote_code
    )
    if base.weights is None:
        raise ModelError(f"{spec.weights}, the base of the adapter, holds no weights")
    aside = to.with_name(f".{to.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix="hocket-adapter-") as made:
            held = folder.adapter
            if not stays:
                assert last is not None
                held = adapter.adapter_of_checkpoint(last, Path(made) / "adapter", spec)
            lora.merge_adapter(held, base, aside, spec.options)
        if (folder.data / "tokenizer.json").exists():
            from hocket.training.tokenizer import Tokenizer

            Tokenizer.load(folder.data).save(aside)
        if to.exists():
            shutil.rmtree(to)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return to


def _own(folder: RunFolder) -> tuple[Path, Path]:
    """Where the run itself exports to at its end."""
    return folder.model.resolve(), folder.adapter.resolve()


def _unfinished(folder: RunFolder) -> RunFolderError:
    return RunFolderError(
        f"{folder.path} holds neither a checkpoint nor a finished model",
        hint="train with --save-every, or let the run reach its end",
    )


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


def card(folder: RunFolder, spec: RunSpec, name: str, *, adapter: bool) -> str:
    """The card as Markdown, with the header that the Hub reads.

    Files of this machine are named without their folders.

    Args:
        name: of the repository. adapter: it holds an adapter of PEFT alone.
    """
    from hocket.models import repo_id
    from hocket.training import hub_data, mixture

    given = [mixture.unweighted(path) for path in spec.data]
    base = None if Path(spec.model).exists() else repo_id.parse_repo(spec.model)
    sets = [None if Path(path).exists() else hub_data.parse_data(path) for path, _ in given]
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hocket"],
    }
    if base is not None:
        header["base_model"] = base.id
    named = sorted({one.repo.id for one in sets if one is not None})
    if named:
        header["datasets"] = named
    data = [
        (f"`{one}`" if one is not None else f"`{Path(path).name}` (a local file)")
        + (f" with weight {weight}" if weight else "")
        for one, (path, weight) in zip(sets, given, strict=True)
    ]
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in header.items()),
        "---",
        "",
        f"# {name.partition('/')[2]}",
        "",
        f"{_what(spec, base)} with hocket {hocket.__version__}.",
        "The licence is not stated here: it follows from those of the base model and the data.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in _facts(folder, spec, data).items()),
        "",
    ]
    return "\n".join(lines)


def _what(spec: RunSpec, base: Any) -> str:
    kind = f"`{spec.config.get('model_type', 'model')}`"
    if spec.weights is None:
        return f"A {kind} model, trained from random weights"
    origin = f"`{base}`" if base is not None else f"`{Path(spec.model).name}`"
    rank = spec.options.lora_rank
    how = "fine-tuned" if rank is None else f"fine-tuned by LoRA of rank {rank}"
    return f"{origin}, a {kind} model, {how}"


FIGURES = {
    "loss": "Loss of the last step",
    "held_out_loss": "Held-out loss",
    "held_out_perplexity": "Held-out perplexity",
}
"""Keys of metrics.jsonl in the card, and their titles."""


def _facts(folder: RunFolder, spec: RunSpec, data: list[str]) -> dict[str, str]:
    work, options = spec.workload, spec.options
    rows = _last_rows(folder)
    found = {
        "Steps": f"{rows.get('step', options.steps):,}",
        "Tokens of a step": f"{work.global_batch} x {work.seq_len:,}",
        "Data": ", ".join(data) or "not recorded",
        "Layout": f"`{spec.layout}`",
        "Number format": work.dtype,
        "Learning rate": f"{options.lr:g}, {options.lr_schedule} to {options.min_lr:g}",
        "Seed": str(options.seed),
    }
    for key, title in FIGURES.items():
        if key in rows:
            found[title] = f"{rows[key]:.4f}"
    return found


def _last_rows(folder: RunFolder) -> dict[str, Any]:
    """The last value of each figure in metrics.jsonl."""
    found: dict[str, Any] = {}
    try:
        for line in folder.metrics_file.read_text().splitlines():
            row = parse_json(line)
            found |= {k: row[k] for k in ("step", *FIGURES) if row.get(k) is not None}
    except (OSError, *MALFORMED):
        pass
    return found
