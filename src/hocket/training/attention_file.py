"""The attention file of a run folder: the kernel of each kind of attention layer on CUDA."""

from __future__ import annotations

import json
import warnings

from hocket.models.attention_layers import kernel_rows
from hocket.spec.files import write_text
from hocket.spec.run import RunFolder
from hocket.training.build import RankJob, dtype_of


def write_attention(folder: RunFolder, job: RankJob, *, packed: bool) -> None:
    """Name the kernels; a warning where a configuration lacks what that takes: a report does not
    end a run.

    `packed`: whether a row may hold several documents.
    """
    try:
        rows = kernel_rows(
            job.skeleton,
            dtype=dtype_of(job.spec.workload.dtype),
            device=job.mesh.device,
            seq_len=job.spec.workload.seq_len,
            packed=packed,
            context=job.spec.layout.cp > 1,
        )
    except Exception as error:  # whatever a configuration lacks
        warnings.warn(f"attention kernels are not known: {error}", stacklevel=1)
        return
    write_text(folder.attention_file, json.dumps(rows))
