"""The adapter as peft writes it: adapter_config.json and adapter_model.safetensors.

Whole tensors are assembled from the ranks' boxes as an export's are; names and configuration are
peft's, so that `PeftModel.from_pretrained` loads the directory onto the base.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.models.base_weights import METADATA
from hocket.models.lora import peft_config, saved_name
from hocket.models.skeleton import build_skeleton
from hocket.models.source import run_source
from hocket.spec.run import RunSpec
from hocket.spec.tensor_file import TensorEntry, write_tensors
from hocket.training.export import appearing, checkpoint_opened, of_ranks, refuse_other

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
    with appearing(to) as aside:
        with checkpoint_opened(checkpoint) as whole:
            names = sorted(whole.names())
            entries = [
                TensorEntry(
                    name=saved_name(name),
                    dtype=whole.dtypes[name],
                    shape=whole.placements[name].shape,
                )
                for name in names
            ]
            tensors: Any = (whole.tensor(name) for name in names)
            metadata = {"format": "pt"} | ({METADATA: spec.base} if spec.base else {})
            write_tensors(aside / WEIGHTS, entries, tensors, metadata)
        source = run_source(spec)
        skeleton = build_skeleton(source.config, code=source.code)
        config = peft_config(skeleton, spec.options, spec.weights)
        if source.repo is not None:  # by its name, so that it is found on any machine
            base, _, commit = source.repo.partition("@")
            config.base_model_name_or_path, config.revision = base, commit
        config.save_pretrained(str(aside))
    return to


def adapter_of_ranks(parallel: Parallel, to: Path, spec: RunSpec) -> Path:
    """Write the adapter of live ranks; every rank calls it."""
    from hocket.runtime.lora import TrainedParameters

    return of_ranks(
        TrainedParameters(parallel),
        parallel.mesh,
        to,
        refuse=lambda: refuse_occupied(to),
        assemble=lambda written: adapter_of_checkpoint(written, to, spec),
    )


def refuse_occupied(to: Path) -> None:
    """Raise OptionError where `to` holds something that an adapter would destroy."""
    refuse_other(to, CONFIG, "adapter")
