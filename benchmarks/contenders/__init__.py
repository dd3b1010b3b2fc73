"""The contenders: hocket and its peers, axis by axis."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.groups import Contender

AXES = ("one", "data", "zero", "tensor", "sequence", "context", "expert", "pipeline", "three")
"""Tables, in the order they are measured."""

SIZED = frozenset({"data", "zero", "tensor", "sequence", "context", "expert"})
"""Axes whose contenders run on any number of ranks."""

TITLES = {
    "one": "one process",
    "data": "data parallel, {ranks} ranks",
    "zero": "ZeRO-1, -2 and -3, {ranks} ranks",
    "tensor": "tensor parallel, {ranks} ranks",
    "sequence": "tensor parallel on slices of sequences, {ranks} ranks",
    "context": "context parallel, sequences of 2048, {ranks} ranks",
    "expert": "experts of a Mixtral, 8 a layer and 2 a token, {ranks} ranks",
    "pipeline": "pipeline, 2 ranks, 4 microbatches",
    "three": "dp2.pp2.tp2, 8 ranks",
}

REFERENCE = "one process, 1 thread"

_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def contenders(microbatches: int, ranks: int = 2) -> list[Contender]:
    """Every contender, extras included.

    `microbatches` is the pipeline's, per data rank; `ranks` those of axes that run on any number.
    """
    pytorch = "benchmarks.contenders.pytorch"
    found = [
        Contender(
            name=f"one process, {threads} thread{'s' if threads > 1 else ''}",
            axis="one",
            entry="benchmarks.contenders.one_process:build",
            world_size=1,
            threads=threads,
        )
        for threads in (1, 2)
    ]
    found += [
        Contender(name="PyTorch DDP", axis="data", entry=f"{pytorch}:data_parallel"),
        Contender(
            name="accelerate",
            axis="data",
            entry="benchmarks.contenders.accelerate:data_parallel",
            requires=("accelerate",),
        ),
        Contender(
            name="DeepSpeed ZeRO-1",
            axis="data",
            entry="benchmarks.contenders.deepspeed:zero",
            requires=("deepspeed",),
            environment=_DEEPSPEED,
        ),
        Contender(
            name="Megatron-Core DDP",
            axis="data",
            entry="benchmarks.contenders.megatron:build",
            options={"tp": 1},
            requires=("megatron", "einops"),
        ),
        *(
            Contender(
                name=f"PyTorch fully_shard, ZeRO-{stage}",
                axis="zero",
                entry=f"{pytorch}:sharded",
                options={"stage": stage},
            )
            for stage in (2, 3)
        ),
        *(
            Contender(
                name=f"DeepSpeed, ZeRO-{stage}",
                axis="zero",
                entry="benchmarks.contenders.deepspeed:zero",
                options={"stage": stage},
                requires=("deepspeed",),
                environment=_DEEPSPEED,
            )
            for stage in (1, 2, 3)
        ),
        Contender(
            name="NeMo Automodel, ZeRO-3",
            axis="zero",
            entry="benchmarks.contenders.automodel:sharded",
            requires=("nemo_automodel",),
        ),
        Contender(name="PyTorch DTensor", axis="tensor", entry=f"{pytorch}:tensor_parallel"),
        Contender(
            name="PyTorch DTensor, loss_parallel",
            axis="tensor",
            entry=f"{pytorch}:tensor_parallel",
            options={"split_loss": True},
        ),
        Contender(
            name="transformers",
            axis="tensor",
            entry="benchmarks.contenders.transformers:tensor_parallel",
            requires=("accelerate",),
        ),
        Contender(
            name="DeepSpeed AutoTP",
            axis="tensor",
            entry="benchmarks.contenders.deepspeed:tensor_parallel",
            requires=("deepspeed",),
            environment=_DEEPSPEED,
        ),
        Contender(
            name="Megatron-Core",
            axis="tensor",
            entry="benchmarks.contenders.megatron:build",
            options={"tp": ranks},
            requires=("megatron", "einops"),
        ),
    ]
    found += [
        Contender(
            name=f"PyTorch DTensor sequence parallel{also}",
            axis="sequence",
            entry=f"{pytorch}:tensor_parallel",
            options={"split_loss": bool(also), "slices": True},
        )
        for also in ("", ", loss_parallel")
    ]
    found += [
        Contender(
            name="PyTorch ring",
            axis="context",
            entry="benchmarks.contenders.pytorch_ring:build",
        ),
        Contender(
            name="DeepSpeed-Ulysses",
            axis="context",
            entry="benchmarks.contenders.deepspeed:sequence",
            requires=("deepspeed",),
            environment=_DEEPSPEED,
        ),
        *(
            Contender(
                name=f"transformers, {name}",
                axis="expert",
                entry="benchmarks.contenders.transformers:expert_parallel",
                options={"exchange": exchange},
                requires=("accelerate",),
            )
            for name, exchange in (("all-to-all", True), ("all-reduce", False))
        ),
        Contender(
            name="DeepSpeed MoE",
            axis="expert",
            entry="benchmarks.contenders.deepspeed:experts",
            requires=("deepspeed",),
            environment=_DEEPSPEED,
        ),
        Contender(
            name="Megatron-Core MoE",
            axis="expert",
            entry="benchmarks.contenders.megatron:build",
            options={"tp": 1, "ep": ranks},
            requires=("megatron", "einops"),
        ),
    ]
    schedules = {
        "GPipe": "GPipe",
        "1F1B": "1F1B",
        "interleaved 1F1B": "Interleaved1F1B",
        "ZB-V": "ZBVZeroBubble",
    }
    found += [
        Contender(
            name=f"PyTorch {name}",
            axis="pipeline",
            entry=f"{pytorch}:pipeline",
            options={"schedule": schedule},
        )
        for name, schedule in schedules.items()
    ]
    found += [
        Contender(
            name="DeepSpeed pipeline",
            axis="pipeline",
            entry="benchmarks.contenders.deepspeed:pipeline",
            requires=("deepspeed",),
            environment=_DEEPSPEED,
        ),
        Contender(
            name="PyTorch fully_shard x 1F1B x DTensor",
            axis="three",
            entry=f"{pytorch}:three_axes",
            world_size=8,
        ),
    ]
    sized = [replace(one, world_size=ranks) if one.axis in SIZED else one for one in found]
    return sized + _ours(microbatches, ranks)


def _ours(microbatches: int, n: int) -> list[Contender]:
    cut = f"microbatches={microbatches}"
    # (text of the table, layout, axis, ranks)
    layouts = [
        (f"dp{n}", f"dp{n}", "data", n),
        *((f"dp{n} zero={stage}", f"dp{n}:zero={stage}", "zero", n) for stage in (1, 2, 3)),
        (f"tp{n}", f"tp{n}", "tensor", n),
        (f"tp{n} whole sequences", f"tp{n}", "sequence", n),
        (f"tp{n} sequence parallel", f"tp{n}:sequence_parallel=true", "sequence", n),
        (f"cp{n} ring", f"cp{n}", "context", n),
        (f"cp{n} ulysses", f"cp{n}", "context", n),
        (f"dp{n}.ep{n}", f"dp{n}.ep{n}", "expert", n),
        (f"dp{n}.ep{n} zero=1", f"dp{n}.ep{n}:zero=1", "expert", n),
        ("pp2 gpipe", f"pp2:schedule=gpipe,{cut}", "pipeline", 2),
        ("pp2 1f1b", f"pp2:schedule=1f1b,{cut}", "pipeline", 2),
        ("pp2 interleaved", f"pp2:schedule=interleaved,virtual_stages=2,{cut}", "pipeline", 2),
        ("pp2 zero-bubble", f"pp2:schedule=zero-bubble,{cut}", "pipeline", 2),
        ("dp2.pp2.tp2 1f1b", f"dp2.pp2.tp2:schedule=1f1b,{cut}", "three", 8),
    ]
    return [
        Contender(
            name=f"hocket {text} on {backend}",
            axis=axis,
            entry="benchmarks.contenders.hocket:build",
            world_size=ranks,
            options={
                "layout": layout,
                "backend": backend,
                "context_parallel": "ulysses" if text.endswith("ulysses") else "ring",
            },
            ours=True,
        )
        for text, layout, axis, ranks in layouts
        for backend in ("shm", "gloo")
    ]
