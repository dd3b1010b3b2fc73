"""Speed checks: matrix multiplication, training, prefill and decode as shares of the GPU's peaks.

Lines of training and decode also carry the planners' predictions.

Model flops utilization counts 6 N + 12 L H S operations a token (`training.utilization`), nothing
for recomputation. A decode step at batch 1 streams every weight once: its share of the memory
bandwidth is weights and cache over the time of a step.

A rehearsal executes the same code at a tiny size on the CPU and judges no rate.

Not executed on a GPU yet.
"""

from __future__ import annotations

import time
from typing import Any

from hocket.doctor.check import CPU, FAKE, Cannot, CheckOutcome, GpuCheck, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import TrainedModel, catalogue, spec
from hocket.doctor.place import Place, catalogue_name

MFU_GOAL = 0.55
"""Of a 1B Llama on an H200, compiled."""
BANDWIDTH_GOAL = 0.8
"""Of a decode step at batch 1."""

_SERVED = "hocket.doctor.fake:fake_server"
GB = 1e9


_row = row_of("hocket.doctor.speed", group="speed", seconds=2.0, timeout=120.0)


def _training(name: str, what: str, least: float, **arguments: Any) -> GpuCheck:
    memory = arguments.pop("memory", 60 * GB)
    heavy = bool(arguments.get("compile"))
    return _row(
        f"train-{name}", what, "time_training", f"model flops utilization of {least:g} or more",
        arguments={"least": least, **arguments}, seconds=20.0 if heavy else 8.0, timeout=240.0,
        memory=memory, capability=(8, 9) if arguments.get("dtype") == "fp8" else (8, 0),
        packages=("torchao",) if arguments.get("dtype") == "fp8" else (),
        # CPUs have no fp8 matmul.
        rehearsals=(FAKE,) if arguments.get("dtype") == "fp8" else (CPU, FAKE),
        fake="hocket.doctor.fake:fake_step",
    )  # fmt: skip


CHECKS = (
    _row(
        "rate-matmul", "bf16 matrix multiplication of 8192 x 8192 x 8192", "time_matmul",
        "0.65 of the peak or more", capability=(8, 0), rehearsals=(CPU, FAKE),
    ),
    _row("rate-memory", "copy of 1 GiB within the GPU's memory", "time_copy",
         "0.8 of the peak bandwidth or more", rehearsals=(CPU, FAKE)),
    _row("rate-host-copy", "copies between pinned host memory and the GPU", "host_copy",
         "0.7 of the PCIe link's rate or more, each way", rehearsals=(CPU, FAKE)),
    _row("rate-launch", "launches of a kernel that adds one number", "time_launch",
         "10 microseconds or less each", rehearsals=(CPU, FAKE)),
    _training("1b", "bf16 training of Llama 3.2 1B, compiled, 4 sequences of 4,096 tokens",
              MFU_GOAL, model="llama-3.2-1b", rows=4, compile=True),
    _training("1b-eager", "the same without torch.compile", 0.35, model="llama-3.2-1b", rows=4),
    _training("1b-recompute", "the same with every layer recomputed", 0.30,
              model="llama-3.2-1b", rows=4, fields="recompute=full"),
    _training("8b-layers", "bf16 training of 8 layers of Llama 3 8B, compiled", 0.5,
              model="llama-3-8b", layers=8, rows=2, compile=True, memory=74 * GB),
    _training("8b-layers-fp8", "the same with linear layers in fp8, counted against the bf16 peak",
              0.55, model="llama-3-8b", layers=8, rows=2, compile=True, dtype="fp8",
              memory=74 * GB),
    *(
        _row(
            f"decode-{name}", f"decode steps of {title}, batch {rows}, context 1,024, CUDA graphs",
            "time_decode", f"{least:g} of the memory bandwidth or more", capability=(8, 0),
            arguments={"model": model, "rows": rows, "least": least}, seconds=seconds,
            timeout=180.0, memory=memory, rehearsals=(CPU, FAKE), fake=_SERVED, slow=True,
        )
        for name, title, model, rows, least, seconds, memory in (
            ("1b", "Llama 3.2 1B", "llama-3.2-1b", 1, BANDWIDTH_GOAL, 5.0, 8 * GB),
            ("8b", "Llama 3 8B", "llama-3-8b", 1, BANDWIDTH_GOAL, 8.0, 24 * GB),
            ("8b-batch-32", "Llama 3 8B", "llama-3-8b", 32, 0.5, 8.0, 32 * GB),
        )
    ),
    _row("decode-graphs", "decode steps of Llama 3.2 1B with and without CUDA graphs, and the "
         "memory of graphs of 1 to 64 rows", "time_graphs",
         "faster with CUDA graphs, which take at "
         "most the memory that the server sets aside for them, within 64 MiB", capability=(8, 0),
         memory=12 * GB, seconds=8.0, rehearsals=(FAKE,), fake=_SERVED, slow=True),
    *(
        _row(
            f"prefill-{name}", f"prefill of {title}, 8,192 tokens/step", "prefill",
            f"model flops utilization of {least:g} or more", capability=(8, 0),
            arguments={"model": model, "least": least}, seconds=8.0, timeout=180.0, memory=memory,
            rehearsals=(CPU, FAKE), fake=_SERVED, slow=True,
        )
        for name, title, model, least, memory in (
            ("1b", "Llama 3.2 1B", "llama-3.2-1b", 0.4, 12 * GB),
            ("8b", "Llama 3 8B", "llama-3-8b", 0.5, 28 * GB),
        )
    ),
    _row("serve-1b", "a whole server of Llama 3.2 1B: start, prefill, 128 tokens at batch 1",
         "time_replica",
         "0.6 of the memory bandwidth or more, ready within 60 s", capability=(8, 0),
         memory=8 * GB, seconds=30.0, timeout=240.0, slow=True, rehearsals=(CPU, FAKE),
         fake=_SERVED),
)  # fmt: skip


# --- the device ------------------------------------------------------------------------------


def time_matmul(place: Place) -> CheckOutcome:
    """Operations/s of a large matrix multiplication."""
    import torch

    size = place.size(8192, 64)
    a, b = (place.draw(size, size, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    seconds = place.kernel_seconds(lambda: a @ b)
    rate = 2 * size**3 / seconds
    if place.form != FAKE:
        place.values["flops_per_second"] = rate
    place.at_least("share_of_peak", rate / place.peak_flops(), 0.65)
    return place.outcome()


def time_copy(place: Place) -> CheckOutcome:
    """Bytes/s read and written by a copy."""
    import torch

    size = place.size(1 << 30, 1 << 16)
    source = torch.zeros(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    rate = 2 * size / place.kernel_seconds(lambda: target.copy_(source))
    if place.form != FAKE:
        place.values["bytes_per_second"] = rate
    place.at_least("share_of_peak", rate / place.peak_bandwidth(), 0.8)
    return place.outcome()


def host_copy(place: Place) -> CheckOutcome:
    """Bytes/s between host and device, through pinned memory."""
    import torch

    from hocket.probing import devices

    size = place.size(1 << 29, 1 << 16)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=place.on_gpu)
    there = torch.empty(size, dtype=torch.uint8, device=place.device)
    found = devices.find_devices().devices
    link = found[0].pcie_rate if place.on_gpu and found else 0.0
    for name, call in (
        ("to_device", lambda: there.copy_(host, non_blocking=True)),
        ("to_host", lambda: host.copy_(there, non_blocking=True)),
    ):
        rate = size / place.kernel_seconds(call)
        place.values[f"{name}_bytes_per_second"] = rate
        if link:
            place.at_least(f"{name}_share_of_link", rate / link, 0.7)
    if place.on_gpu and not link:
        raise Cannot("NVML does not report the PCIe link")
    return place.outcome()


def time_launch(place: Place) -> CheckOutcome:
    """Seconds of the host for one small operation."""
    x = place.draw(1)

    def many() -> None:
        for _ in range(1000):
            x.add_(1)

    place.at_most("seconds_per_launch", place.seconds(many, repeats=5) / 1000, 10e-6)
    return place.outcome()


# --- training --------------------------------------------------------------------------------


def time_training(
    place: Place, *, model: str, rows: int, least: float, layers: int | None = None,
    fields: str = "", dtype: str = "bf16", compile: bool = False,
) -> CheckOutcome:  # fmt: skip
    """Tokens/s and model flops utilization of whole optimizer steps."""
    from hocket.training.utilization import flops_per_token

    length = place.size(4096, 16)
    config = catalogue(model, layers) if place.on_gpu else BASE
    job = spec(
        config, layout=f"dp1:{fields}" if fields else "dp1", dtype=dtype, seq_len=length,
        rows=place.size(rows, 2), compile=compile and place.on_gpu,
    )  # fmt: skip
    begun = time.perf_counter()
    trained = TrainedModel(place, job)
    batches = trained.batches()
    first = float(trained.step(batches))
    place.values["start_seconds"] = time.perf_counter() - begun
    seconds = place.seconds(lambda: trained.step(batches), repeats=8, warmup=3)
    last = float(trained.step(batches))
    tokens = job.workload.global_batch * length
    place.values |= {
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_loss": first,
        "last_loss": last,
    }
    if not last < first:
        place.failures.append(f"the loss of one batch went from {first:.4f} to {last:.4f}")
    if place.on_gpu:
        predict_step(place, model, tokens // length, length, layers)
    work = flops_per_token(trained.skeleton, length) * tokens
    place.at_least("model_flops_utilization", work / seconds / place.peak_flops(), least)
    return place.outcome()


def predict_step(
    place: Place, model: str, rows: int, length: int, layers: int | None = None
) -> tuple[float, float] | None:
    """Note the planner's seconds and bytes of a step on this GPU; None where it has none.

    The catalogue's shapes are those of whole models: with fewer layers nothing is predicted.
    """
    from hocket.catalogue import hardware
    from hocket.jobs.plan import plan_training
    from hocket.spec.errors import HocketError

    if layers is not None:
        return None
    try:
        gpu = hardware.gpu(catalogue_name(place.name)).name
        best = plan_training(
            model, cluster=f"1x{gpu}", seq_len=length, global_batch=rows,
            layout="dp1:microbatches=1",
        ).best  # fmt: skip
    except HocketError as error:
        place.values["prediction"] = error.message
        return None
    place.predicted |= {"step_seconds": best.step_seconds.median, "peak_bytes": best.memory}
    return best.step_seconds.median, float(best.memory)


# --- serving ---------------------------------------------------------------------------------


class Decoding:
    """A model with random weights on the place's device, and steps for its runner.

    Legend: R rows that decode together, C tokens of context of each.

    Args:
        slots: rows that the runner has room for, of which graphs are captured. None: R.
    """

    def __init__(
        self, place: Place, model: str, rows: int, tokens: int, slots: int | None = None
    ) -> None:
        import torch

        from hocket.doctor.serving import kernels_of, runner_of
        from hocket.models import skeleton
        from hocket.serving.engine import attention

        self.place, self.rows = place, rows
        config = catalogue(model) if place.on_gpu else BASE
        context = place.size(1024, 32)
        kind = torch.bfloat16 if place.on_gpu else torch.float32
        module: Any = skeleton.build_skeleton(
            config, device=place.device, dtype=kind, dropout=0.0, attention=attention.NAME
        )
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
        longest = max(context + 512, tokens + 256)
        # Blocks of 256 tokens suit every kernel of the table.
        self.block_size = place.size(256, 16)
        self.blocks = -(-longest // self.block_size)
        begun = time.perf_counter()
        self.runner = runner_of(
            place, module, block_size=self.block_size, dtype=kind, rows=slots or rows,
            tokens=tokens,
            max_len=min(longest, config["max_position_embeddings"]),
            num_blocks=rows * self.blocks,
        )  # fmt: skip
        place.values |= {
            "allocate_and_capture_seconds": time.perf_counter() - begun,
            "kernel": kernels_of(self.runner),
        }
        self.weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        self.skeleton = module
        self.done = [0] * rows
        self.number = 0

    def plan(self, count: int) -> Any:
        """A step of `count` tokens of every row."""
        from hocket.doctor.paged import ToyScheduler
        from hocket.serving.scheduling.step import LAST, BatchRow, StepPlan

        toy = ToyScheduler([[0]] * self.rows, block_size=self.block_size, num_blocks=1)
        rows = []
        for slot in range(self.rows):
            first = -(-self.done[slot] // self.block_size)
            self.done[slot] += count
            last = -(-self.done[slot] // self.block_size)
            new = list(range(slot * self.blocks + first, slot * self.blocks + last))
            rows.append(BatchRow(slot, self.done[slot] - count, count, LAST, new))
        admitted = [toy._admission(s) for s in range(self.rows)] if self.number == 0 else []
        self.number += 1
        tokens = [7] * (self.rows * count)
        return StepPlan(self.number - 1, rows, tokens, admitted, [])

    def cache_bytes(self) -> int:
        """Bytes of keys and values that the next decode step reads."""
        each = self.runner.bytes_per_block / self.block_size
        return int(each * sum(self.done))


def time_decode(place: Place, *, model: str, rows: int, least: float) -> CheckOutcome:
    """Seconds of a decode step without sampling, as a share of the memory bandwidth."""
    context, steps = place.size((1024, 100), (32, 4))
    decoding = Decoding(place, model, rows, tokens=rows * context)
    decoding.runner.run(decoding.plan(context))
    seconds = place.seconds(lambda: decoding.runner.run(decoding.plan(1)), repeats=steps, warmup=10)
    read = decoding.weight_bytes + decoding.cache_bytes()
    place.values |= {"step_seconds": seconds, "tokens_per_second": rows / seconds}
    if place.on_gpu:
        predict_decode(place, model, rows, context)
    place.at_least("share_of_bandwidth", read / seconds / place.peak_bandwidth(), least)
    return place.outcome()


def predict_decode(place: Place, model: str, rows: int, context: int) -> float | None:
    """Note the service planner's seconds of a decode step; None where it has none."""
    from hocket.catalogue import hardware
    from hocket.jobs.serving.plan import serve_plan
    from hocket.spec.errors import HocketError

    try:
        gpu = hardware.gpu(catalogue_name(place.name)).name
        (found,) = serve_plan(
            model, cluster=f"1x{gpu}", prompt_len=context, output_len=128,
            requests_per_second=0.01, layout="tp1",
        )  # fmt: skip
        seconds = found.best.decode_seconds if found.best is not None else None
    except (HocketError, ValueError) as error:
        place.values["prediction"] = str(error)
        return None
    if seconds is None:
        return None
    if rows == 1:
        place.predicted["step_seconds"] = seconds
    return float(seconds)


def time_graphs(place: Place) -> CheckOutcome:
    """Seconds of a decode step replayed from a graph, and launched kernel by kernel."""
    decoding = Decoding(place, "llama-3.2-1b", 1, tokens=1024, slots=64)
    captured = decoding.runner.graphs_json()
    if not captured["sizes"]:
        raise Cannot(f"decode steps are not captured: {captured['reason']}")
    decoding.runner.run(decoding.plan(1024))

    def step() -> None:
        decoding.runner.run(decoding.plan(1))

    replayed = place.seconds(step, repeats=50, warmup=5)
    decoding.runner.graphs = None
    eager = place.seconds(step, repeats=50, warmup=5)
    place.values |= {"replayed_step_seconds": replayed, "eager_step_seconds": eager}
    place.at_least("speedup", eager / replayed, 1.0)
    set_aside, taken = _graph_memory(decoding)
    place.values["graph_bytes"], place.predicted["graph_bytes"] = taken, set_aside
    place.at_most("graph_bytes_beyond", max(0, taken - set_aside), 64 << 20)
    return place.outcome()


def _graph_memory(decoding: Decoding) -> tuple[int, int]:
    """Bytes that a server sets aside for the graphs of all sizes, and bytes that they take."""
    import gc

    import torch

    from hocket.serving.engine.memory import graph_bytes

    runner = decoding.runner

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    runner.drop_trial()  # cache and tables; the graphs are gone already
    free()
    set_aside = graph_bytes(runner)
    blocks = decoding.blocks
    before = free()
    runner.capture(blocks)
    cache = (blocks + 1) * runner.bytes_per_block
    return set_aside, max(0, before - free() - cache)


def prefill(place: Place, *, model: str, least: float) -> CheckOutcome:
    """Tokens/s of a prompt, and model flops utilization: a third of what training counts."""
    from hocket.training.utilization import flops_per_token

    length = place.size(8192, 32)
    decoding = Decoding(place, model, 1, tokens=length)
    plan = decoding.plan(length)
    seconds = place.seconds(lambda: decoding.runner.run(plan), repeats=5, warmup=2)
    # Half of attention is causal; the output head is applied to one token alone.
    work = flops_per_token(decoding.skeleton, length // 2) / 3 * length
    place.values |= {"seconds": seconds, "tokens_per_second": length / seconds}
    place.at_least("model_flops_utilization", work / seconds / place.peak_flops(), least)
    return place.outcome()


def time_replica(place: Place) -> CheckOutcome:
    """Tokens/s of a whole replica: scheduler, sampling, ranks of their own."""
    import tempfile
    from pathlib import Path

    from hocket.jobs.serving.llm import LLM
    from hocket.serving.request import SamplingParams

    config = catalogue("llama-3.2-1b") if place.on_gpu else BASE
    new = place.size(128, 32)
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as folder:
        weight_bytes = saved_model(place, config, Path(folder))
        begun = time.perf_counter()
        with LLM(
            folder, device=place.kind, dtype=place.size("bf16", "fp32"),
            max_model_len=place.size(2048, 128),
        ) as llm:  # fmt: skip
            ready = time.perf_counter() - begun
            sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
            prompt = [5] * place.size(1024, 16)
            llm.generate([prompt], sampling)
            begun = time.perf_counter()
            llm.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0.0))
            first = time.perf_counter() - begun
            begun = time.perf_counter()
            (answer,) = llm.generate([prompt], sampling)
            seconds = max(1e-9, time.perf_counter() - begun - first) / (new - 1)
    place.equal("tokens of the answer", len(answer.tokens), new)
    place.values |= {"first_token_seconds": first, "tokens_per_second": 1 / seconds}
    place.at_most("ready_seconds", ready, 60.0)
    place.at_least("share_of_bandwidth", weight_bytes / seconds / place.peak_bandwidth(), 0.6)
    return place.outcome()


def saved_model(place: Place, config: dict[str, Any], folder: Any) -> int:
    """Write a model with random weights and a tokenizer; the bytes of its weights."""
    import json

    import torch

    from hocket.models import skeleton
    from hocket.training.reference import save_reference
    from hocket.training.tokenizer import byte_tokenizer

    kind = torch.bfloat16 if place.on_gpu else torch.float32
    module: Any = skeleton.build_skeleton(config, device="cpu", dtype=kind)
    tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        tensors[name] = torch.empty_like(parameter).normal_(std=0.02, generator=generator)
    save_reference(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(folder)
    return sum(t.numel() * t.element_size() for t in tensors.values())
