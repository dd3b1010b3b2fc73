"""`hocket links`: the communication of each axis of a layout, on its links and on others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hocket.cli.flags import Model, Text, parse_flags
from hocket.spec.errors import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinksFlags:
    """Estimate a layout's communication: bytes of each axis, its link, seconds there and on
    NVLink 2 to 5, PCIe and networks; and the combined memory of GPUs that share links.

    Attributes:
        model: catalogue name, Hugging Face directory, run folder, or ORG/NAME on the Hugging Face
            Hub (only its configuration is downloaded).
        cluster: 2x8xH100-SXM, 16xA100-40-PCIe, 4xaws-p5, a TOML file, or auto (this machine).
        layout: dp2.tp8, or with fields: dp2.pp2.tp4:microbatches=8,order=dp-tp-cp-pp.
        seq_len: tokens per sequence.
        global_batch: sequences per step (default: as of `hocket plan`).
        dtype: matmul precision (default: bf16; fp32 on CPU). One of: bf16, fp16, fp8.
        json: print one JSON object.
    """

    model: Model = ""
    cluster: Text = None
    layout: Text = None
    seq_len: int = 4096
    global_batch: int | None = None
    dtype: Text = None
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Price and print. Returns 0."""
    flags = parse_flags(LinksFlags, "links", arguments, LinksFlags())
    if not flags.model:
        raise OptionError(
            "which model?", hint="hocket links llama-2-7b --cluster 8xA100-SXM-80 --layout tp2.dp4"
        )
    if flags.cluster is None:
        raise OptionError("which GPUs?", hint="--cluster 8xA100-SXM-80")
    if flags.layout is None:
        raise OptionError("which layout?", hint="--layout dp4.tp2")
    from hocket.jobs import link_prices

    found = link_prices.links(
        flags.model,
        cluster=flags.cluster,
        layout=flags.layout,
        seq_len=flags.seq_len,
        global_batch=flags.global_batch,
        precision=flags.dtype,
    )
    if flags.json:
        import json

        print(json.dumps(found.to_json()))
    else:
        print(link_prices.link_prices_text(found))
    return 0
