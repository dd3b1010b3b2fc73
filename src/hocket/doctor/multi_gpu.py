"""Checks of several GPUs: layouts and schedules against one process, collectives, overlap.

Every layout is executed by `hocket check`'s own job: proxy model, reference and ranks. Rates of
collectives are compared with published measurements of NCCL on the same GPUs
(`catalogue.curves`); overlap with the seconds of the same communication by itself.

One GPU cannot hold several ranks under NCCL, which rejects two ranks on one device; two rows report
what NCCL and Gloo of this machine do with it.

Not executed on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, Cannot, CheckOutcome, row_of
from hocket.doctor.families import BASE, FAMILIES
from hocket.doctor.model import WIDE, spec
from hocket.doctor.place import Place, catalogue_name
from hocket.doctor.world import count_here, join, ranks, timed

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext

_HERE = "hocket.doctor.multi_gpu:"
_EQUAL = (
    "loss within 1e-5, each gradient within 1e-4 of its largest entry, values after each of 3 "
    "steps within 0.2 of the learning rate"
)
SHARE_OF_PUBLISHED = 0.8
"""Of the bus bandwidth that was published for the same GPUs."""
HIDDEN = 0.6
"""Share of a communication that computation is to hide."""

LAYOUTS: dict[str, tuple[str, str]] = {
    "dp2": ("dp2", ""),
    "tp2": ("tp2", ""),
    "tp2-sequence": ("tp2:sequence_parallel=true", "with sequence parallelism"),
    "zero1": ("dp2:zero=1", "ZeRO-1"),
    "zero2": ("dp2:zero=2,microbatches=2", "ZeRO-2"),
    "zero3": ("dp2:zero=3", "ZeRO-3"),
    "pp2-1f1b": ("pp2:schedule=1f1b,microbatches=4", ""),
    "pp2-recompute": ("pp2:schedule=1f1b,microbatches=4,recompute=full", ""),
    "dp2-tp2": ("dp2.tp2", ""),
    "dp2-pp2": ("dp2.pp2:microbatches=2", ""),
    "pp2-tp2": ("pp2.tp2:microbatches=2", ""),
    "zero3-tp2": ("dp2.tp2:zero=3", ""),
    "all-axes": ("dp2.pp2.tp2:microbatches=2,zero=2", ""),
    "all-axes-sequence": ("dp2.pp2.tp2:microbatches=2,zero=3,sequence_parallel=true", ""),
    "cp2": ("cp2", "keys and values in a ring"),
    "cp2-ulysses": ("cp2", "heads exchanged for tokens"),
    "cp2-zero1": ("cp2:zero=1", ""),
    "cp2-tp2": ("cp2.tp2", ""),
    "cp2-pp2": ("cp2.pp2:microbatches=2", ""),
    "dp2-cp2-tp2": ("dp2.cp2.tp2:zero=2,microbatches=2", ""),
    "ep2": ("dp2.ep2", ""),
    "ep2-tp2": ("tp2.ep2.etp1", "whole experts over tensor ranks"),
    "ep2-pp2": ("dp2.pp2.ep2:microbatches=2", ""),
    "ep2-zero1": ("dp4.ep2:zero=1", ""),
    "ep4": ("dp2.tp2.ep4.etp1", ""),
    "ep4-nodes": ("dp4.ep4", "tokens sent once to each node of two GPUs"),
    "dp8": ("dp8:zero=1", ""),
    "tp8": ("tp8", "key/value heads are replicated"),
}
"""Name to layout, and what is particular about it; with ep the model is a Mixtral. Every schedule
at every depth is executed by the `pipeline` rows, in one world for each depth."""

DEEP: dict[str, Any] = {**BASE, "num_hidden_layers": 8, "num_attention_heads": 8}
"""The Llama of layouts: eight layers and heads, so that eight ranks can share them."""

_MORE = {
    "cp2": {"attention": "ring"},
    "cp2-ulysses": {"attention": "ulysses"},
    "ep4-nodes": {"dispatch": "node:2"},
}
"""Name of a layout to what its job is asked besides."""

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def _size(layout: str) -> int:
    from hocket.spec.layout import Layout

    return Layout.parse(layout).world_size


_row = row_of(
    "hocket.doctor.multi_gpu", group="multi-gpu", gpus=2, seconds=25.0, timeout=240.0, slow=True,
)  # fmt: skip


CHECKS = (
    *(
        _row(
            f"layout-{name}", f"`hocket check` at {text}{f', {note}' if note else ''}",
            "compare_layout",
            _EQUAL, arguments={"layout": text, **_MORE.get(name, {})}, gpus=_size(text),
            fake="hocket.doctor.fake:fake_layout",
            # Eight ranks are more than a small machine's cores.
            rehearsals=(CPU, FAKE) if _size(text) <= 4 else (FAKE,),
        )
        for name, (text, note) in LAYOUTS.items()
    ),
    *(
        _row(
            f"nccl-{operation}", f"{operation} over all GPUs, 8 B to 256 MiB", "collective",
            f"{SHARE_OF_PUBLISHED:g} or more of the published bus bandwidth at 256 MiB; right "
            "results", arguments={"operation": operation}, seconds=20.0,
        )
        for operation in OPERATIONS
    ),
    _row("nccl-send-recv", "send and receive between neighbours, both ways at once", "collective",
         "results are right", arguments={"operation": "send-recv"}, seconds=20.0),
    *(
        _row(
            f"overlap-{name}", f"training at {text}: communication that computation hides",
            "overlap", f"{HIDDEN:.0%} or more is hidden", arguments={"layout": text},
            capability=(8, 0), seconds=40.0, rehearsals=(CPU, FAKE),
            fake="hocket.doctor.fake:fake_layout",
        )
        for name, text in (("dp2", "dp2"), ("zero2", "dp2:zero=2"), ("zero3", "dp2:zero=3"))
    ),
    _row("generate-tp2", "greedy answers of a tiny Llama at tp2, whose decode steps are captured "
         "in CUDA graphs with their collectives, compared with one GPU", "compare_generation",
         "the same 16 tokens; every rank captures the same sizes", seconds=60.0,
         arguments={"layout": "tp2"}),
    _row("generate-ep2", "greedy answers of a tiny Mixtral at dp2.ep2, whose decode steps are "
         "captured in CUDA graphs with the exchange of tokens, compared with one GPU",
         "compare_generation",
         "the same 16 tokens; every rank captures the same sizes", seconds=60.0,
         arguments={"layout": "dp2.ep2"}),
    _row("generate-cp2", "greedy answers of a tiny Llama at cp2, a prompt's tokens and every block "
         "of the cache over two GPUs, decode steps captured in CUDA graphs with the merging of "
         "what they attend to, compared with one GPU", "compare_generation",
         "the same 16 tokens; every rank captures the same sizes", seconds=60.0,
         arguments={"layout": "cp2"}, rehearsals=(CPU, FAKE),
         fake="hocket.doctor.fake:fake_server"),
    _row("one-gpu-nccl", "two ranks on one GPU, joined by NCCL", "one_gpu",
         "an all-reduce is right",
         arguments={"backend": "nccl"}, gpus=1, seconds=7.0, rehearsals=(),
         unrehearsed="NCCL runs on GPUs alone"),
    _row("one-gpu-gloo", "two ranks on one GPU, joined by Gloo, which copies through the host",
         "one_gpu", "every collective that Gloo has for CUDA tensors is right, all-reduce among "
         "them", arguments={"backend": "gloo"}, gpus=1, seconds=7.0),
)  # fmt: skip


def model_of(layout: str) -> dict[str, Any]:
    """The configuration that a layout is rehearsed with."""
    from hocket.spec.layout import Layout

    if Layout.parse(layout).ep > 1:
        return FAMILIES["mixtral"]
    return DEEP if _size(layout) > 4 else BASE


def compare_layout(
    place: Place, *, layout: str, attention: str = "auto", dispatch: str = "auto"
) -> CheckOutcome:
    """Ranks of a layout, compared with one process."""
    import tempfile
    from pathlib import Path

    from hocket.doctor.speed import saved_model
    from hocket.jobs.check import check_layout
    from hocket.jobs.request import request

    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as folder:
        config = FAMILIES["mixtral"] if ".ep" in layout else DEEP
        saved_model(Place("cpu"), config, Path(folder))
        options = {
            **check_options(folder, layout, place.kind),
            "context_parallel": attention,
            "expert_dispatch": dispatch,
        }
        report = check_layout(request(options))
    place.failures += report.failures[:3]
    return place.outcome(
        ranks=report.world_size, loss=report.steps[-1].loss,
        reference_loss=report.steps[-1].reference_loss,
        largest_difference_of_what_is_allowed=min(report.worst_ratio, 1e30),
    )  # fmt: skip


def check_options(model: str, layout: str, device: str) -> dict[str, Any]:
    """The options of `hocket check` for a row's layout."""
    rows = 32 if "microbatches=16" in layout else 16
    return {"model": model, "layout": layout, "steps": 3, "seq_len": 32, "global_batch": rows,
            "device": device}  # fmt: skip


# --- collectives -----------------------------------------------------------------------------


def collective(place: Place, *, operation: str) -> CheckOutcome:
    """Seconds by size, compared with published ones."""
    from hocket.catalogue import curves, hardware
    from hocket.spec.errors import OptionError

    count = count_here(place)
    sizes = place.size([8, 1 << 10, 1 << 15, 1 << 20, 1 << 25, 1 << 28], [1 << 10, 1 << 15])
    payload = {"operation": operation, "sizes": sizes, "backend": place.size("nccl", "gloo")}
    found = ranks(place, _HERE + "collective_rank", count, payload)
    wrong = [rank for rank, values in enumerate(found) if not values["right"]]
    if wrong:
        place.failures.append(f"ranks {wrong} received wrong values")
    seconds = {size: max(v["seconds"][i] for v in found) for i, size in enumerate(sizes)}
    share = (count - 1) / count
    factor = 1.0 if operation == "send-recv" else 2 * share if operation == "all-reduce" else share
    for size, each in seconds.items():
        place.values[f"seconds_{size}"] = each
    rate = factor * sizes[-1] / seconds[sizes[-1]]
    place.values["bus_bytes_per_second"] = rate
    if not place.on_gpu or operation == "send-recv":
        return place.outcome(ranks=count)
    try:
        gpu = hardware.gpu(catalogue_name(place.name)).name
    except OptionError as error:
        raise Cannot(f"nothing to compare with: {error.message}") from None
    published = [
        curve
        for curve in curves.curves(gpu=gpu, operation=operation)
        if curve.num_gpus == count and curve.num_nodes == 1
    ]
    if not published and not place.failures:
        raise Cannot(f"no measurement of {operation} over {count} {gpu} is published")
    for curve in published[:1]:
        there = curve.bus_bandwidth(sizes[-1])
        place.predicted["bus_bytes_per_second"] = there
        place.at_least("share_of_published", rate / there, SHARE_OF_PUBLISHED)
    return place.outcome(ranks=count)


def collective_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: checks the values of an operation and times it by size."""
    import torch
    import torch.distributed as dist

    device = join(context, payload["backend"])
    rank, count = context.rank, context.world_size
    operation = payload["operation"]
    right = True
    seconds = []
    for size in payload["sizes"]:
        numel = max(count, size // 4 // count * count)
        part = numel // count
        whole = torch.full((numel,), float(rank + 1), device=device)
        piece = torch.full((part,), float(rank + 1), device=device)
        gathered = torch.zeros(numel, device=device)
        own = gathered[:part]
        total = float(count * (count + 1) // 2)

        def call(
            whole: Tensor = whole, piece: Tensor = piece, gathered: Tensor = gathered,
            own: Tensor = own,
        ) -> None:  # fmt: skip
            if operation == "all-reduce":
                dist.all_reduce(whole)
            elif operation == "all-gather":
                dist.all_gather_single(gathered, piece)
            elif operation == "reduce-scatter":
                dist.reduce_scatter_single(piece, whole)
            elif operation == "all-to-all":
                dist.all_to_all_single(gathered, whole)
            else:
                ops = [
                    dist.P2POp(dist.isend, piece, (rank + 1) % count),
                    dist.P2POp(dist.irecv, own, (rank - 1) % count),
                ]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

        call()
        if operation == "all-reduce":
            right &= bool((whole == total).all())
        elif operation == "reduce-scatter":
            right &= bool((piece == total).all())
        elif operation == "send-recv":
            right &= bool((gathered[:part] == (rank - 1) % count + 1).all())
        else:
            expected = torch.arange(1, count + 1, device=device).repeat_interleave(part)
            right &= bool((gathered == expected).all())
        repeats = 20 if device.type == "cuda" else 3
        seconds.append(timed(call, repeats, device))
    context.emit({"event": "found", "values": {"right": right, "seconds": seconds}})


# --- overlap ---------------------------------------------------------------------------------


def overlap(place: Place, *, layout: str) -> CheckOutcome:
    """Seconds of a step on two ranks, of its computation and of its communication alone.

    hidden = (computation + communication - step) / communication
    """
    job = spec(
        place.size({**WIDE, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128}, BASE),
        layout=layout, seq_len=place.size(2048, 16), rows=place.size(8, 4), device=place.kind,
        dtype=place.size("bf16", "fp32"),
    )  # fmt: skip
    found = ranks(place, _HERE + "overlap_rank", 2, {"spec": job.to_json()})
    step, compute, communicate = (
        max(v[key] for v in found) for key in ("step", "compute", "communicate")
    )
    place.values |= {
        "step_seconds": step, "computation_seconds": compute, "communication_seconds": communicate,
        "communicated_bytes": found[0]["bytes"],
    }  # fmt: skip
    place.at_least("hidden_share", (compute + communicate - step) / communicate, HIDDEN)
    return place.outcome()


def overlap_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: the step of the layout, of one rank by itself, and the gradients' bytes alone."""
    import dataclasses

    import torch
    import torch.distributed as dist

    from hocket.doctor.model import TrainedModel
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunSpec, Workload
    from hocket.training.build import build_rank_job

    job = RunSpec.from_json(payload["spec"])
    made = build_rank_job(job, context)
    device = made.mesh.device
    cuda = device.type == "cuda"
    alone = dataclasses.replace(
        job, layout=Layout(microbatches=job.layout.microbatches),
        workload=Workload(
            seq_len=job.workload.seq_len, global_batch=job.workload.global_batch // 2,
            dtype=job.workload.dtype,
        ),
    )  # fmt: skip
    single = TrainedModel(Place("gpu" if cuda else "cpu", context.local_rank), alone)
    batches = single.batches()
    tokens = job.workload.global_batch * job.workload.seq_len
    repeats = 8 if cuda else 2

    def full() -> None:
        made.parallel.forward_backward(batches, tokens)

    def compute() -> None:
        single.parallel.forward_backward(batches, tokens)

    numel = sum(p.numel() for p in single.parallel.parameters())
    gradients = torch.zeros(numel, device=device)
    half = torch.zeros(numel // 2, device=device)
    stage = job.layout.zero

    def communicate() -> None:
        if stage < 2:
            dist.all_reduce(gradients)
            return
        dist.reduce_scatter_single(half, gradients[: 2 * half.numel()])
        if stage == 3:
            for _ in range(2):
                dist.all_gather_single(gradients[: 2 * half.numel()], half)

    values = {}
    for name, call in (("step", full), ("compute", compute), ("communicate", communicate)):
        call()
        dist.barrier()
        values[name] = timed(call, repeats, device)
    context.emit({"event": "found", "values": {**values, "bytes": 4 * numel}})


# --- serving, and one GPU --------------------------------------------------------------------


def compare_generation(place: Place, *, layout: str) -> CheckOutcome:
    """Greedy answers of a split model and of a whole one."""
    import tempfile
    from pathlib import Path

    from hocket.doctor.speed import saved_model
    from hocket.jobs.serving.llm import LLM
    from hocket.serving.request import SamplingParams

    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    prompts = [[5, 9, 33, 12, 60, 7], [11, 4, 50], [*range(3, 43)]]  # the last is split over cp2
    answers = []
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as folder:
        saved_model(Place("cpu"), model_of(layout), Path(folder))
        for each in ("dp1", layout):
            with LLM(folder, each, device=place.kind, dtype="fp32", max_model_len=64) as llm:
                answers.append([a.tokens for a in llm.generate(prompts, sampling)])
                graphs = llm.capacity["graphs"]
    place.equal(f"the answers at {layout}", answers[1], answers[0])
    if place.on_gpu:
        sizes = [each["sizes"] for each in graphs]
        place.equal("sizes that ranks capture", sizes, [sizes[0]] * len(sizes))
        place.equal("why decode steps are not captured", graphs[0]["reason"], "")
        place.equal("whether any size is captured", bool(sizes[0]), True)
    return place.outcome(graphs=str(graphs[0]["sizes"]))


def one_gpu(place: Place, *, backend: str) -> CheckOutcome:
    """Two ranks whose device is GPU 0."""
    from hocket.spec.errors import HocketError

    try:
        found = ranks(place, _HERE + "one_gpu_rank", 2, {"backend": backend})
    except HocketError as error:
        lines = [line for line in error.message.splitlines() if line.strip()]
        text = next((line for line in lines if "uplicate GPU" in line), lines[-1])
        raise Cannot(f"{backend} rejects two ranks on one GPU: {text.strip()}") from None
    for name, text in found[0]["operations"].items():
        place.values[name] = text
    if found[0]["operations"].get("all-reduce") != "right":
        place.failures.append(f"all-reduce: {found[0]['operations'].get('all-reduce')}")
    place.failures += [f"{n}: {t}" for n, t in found[0]["operations"].items() if t == "wrong"]
    return place.outcome()


def one_gpu_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank on GPU 0: tries every collective, and notes what happens."""
    import torch
    import torch.distributed as dist

    from hocket.runtime.device import claim_device

    cuda = context.device_kind == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    claim_device(device)
    context.init_process_group(payload["backend"], device if payload["backend"] == "nccl" else None)
    rank = context.rank
    results: dict[str, str] = {}

    def attempt(name: str, call: Any, expected: list[float]) -> None:
        try:
            found = call()
            results[name] = "right" if found.tolist() == expected else "wrong"
        except (RuntimeError, ValueError) as error:
            if payload["backend"] == "nccl":
                raise
            results[name] = f"not supported: {str(error).strip().splitlines()[0][:120]}"

    value = torch.tensor([1.0 + rank, 10.0], device=device)
    both = torch.zeros(4, device=device)

    def reduced() -> Any:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def cast() -> Any:
        total = value.clone()
        dist.broadcast(total, 1)
        return total

    def gathered() -> Any:
        dist.all_gather_single(both, value)
        return both

    def scattered() -> Any:
        mine = torch.zeros(1, device=device)
        dist.reduce_scatter_single(mine, value)
        return mine

    def sent() -> Any:
        got = torch.zeros(2, device=device)
        works = [dist.isend(value, 1 - rank), dist.irecv(got, 1 - rank)]
        for work in works:
            if work is not None:
                work.wait()
        return got

    attempt("all-reduce", reduced, [3.0, 20.0])
    attempt("broadcast", cast, [2.0, 10.0])
    attempt("all-gather", gathered, [1.0, 10.0, 2.0, 10.0])
    attempt("reduce-scatter", scattered, [3.0] if rank == 0 else [20.0])
    attempt("send-recv", sent, [2.0 - rank, 10.0])
    context.emit({"event": "found", "values": {"operations": results}})
