"""The adapter as peft writes it: adapter_config.json and adapter_model.safetensors.

Whole tensors are assembled from the ranks' boxes as an export's are; names and configuration are
peft's, so that `PeftModel.from_pretrained` loads the directory onto the base.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.models.lora import peft_config, saved_name
from hocket.models.skeleton import build as build_skeleton
from hocket.models.source import of_run
from hocket.spec import checkpoint as words
from hocket.spec.errors import OptionError
from hocket.spec.run import RunSpec
from hocket.spec.tensor_file import Entry, write_tensors
from hocket.training.export import Held, Whole

if TYPE_CHECKING:
    from hocket.runtime.parallel import Parallel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_of_checkpoint(checkpoint: Path, to: Path, spec: RunSpec) -> Path:
    """Write the adapter of one checkpoint's folder, without any rank; it appears when complete.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not hold all of a parameter.
        OptionError: `to` exists and holds something else than an adapter.
    """
    refuse_occupied(to)
    manifest = words.read_manifest(checkpoint)
    aside = to.with_name(f".{to.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            shards = [stack.enter_context(words.open_shard(checkpoint, s)) for s in manifest.shards]
            whole = Whole(manifest, shards)
            names = sorted(whole.names())
            entries = [
                Entry(
                    name=saved_name(name),
                    dtype=whole.dtypes[name],
                    shape=whole.placements[name].shape,
                )
                for name in names
            ]
            tensors: Any = (whole.tensor(name) for name in names)
            write_tensors(aside / WEIGHTS, entries, tensors, {"format": "pt"})
        source = of_run(spec)
        skeleton = build_skeleton(source.config, code=source.code)
        peft_config(skeleton, spec.options, spec.weights).save_pretrained(str(aside))
        if to.exists():
            shutil.rmtree(to)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return to


def adapter_of_ranks(parallel: Parallel, to: Path, spec: RunSpec) -> Path:
    """Write the adapter of live ranks; every rank calls it."""
    from hocket.runtime.checkpoint import World, save_checkpoint
    from hocket.runtime.lora import Trained

    world = World.of(parallel.mesh)
    folder = to.with_name(f".{to.name}.ranks")
    if world.rank == 0:
        refuse_occupied(to)
    written = save_checkpoint(
        folder,
        step=0,
        parallel=Held(Trained(parallel), parallel.mesh.coordinate["dp"] == 0),
        optimizer_state={},
        layout="",
        model="",
        world=world,
    )
    if world.rank == 0:
        try:
            adapter_of_checkpoint(written, to, spec)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    return to


def refuse_occupied(to: Path) -> None:
    """Raise OptionError where `to` holds something that an adapter would destroy."""
    if to.is_file():
        raise OptionError(f"{to} is a file, not a directory")
    if to.is_dir() and any(to.iterdir()) and not (to / CONFIG).exists():
        raise OptionError(
            f"{to} is not empty and holds no adapter", hint=f"--to {to.with_name(to.name)}-adapter"
        )
