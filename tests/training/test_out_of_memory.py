"""Out of memory: what a rank tells of it, from an error raised where a step allocates."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.memory_report import (  # noqa: E402
    AllocatorBytes,
    OwnedBytes,
    device_state,
    out_of_memory_report,
)
from hocket.spec.errors import RankMemoryError  # noqa: E402
from hocket.spec.layout import Layout  # noqa: E402
from hocket.spec.run import RunSpec, TrainOptions, Workload  # noqa: E402
from hocket.training import out_of_memory as oom  # noqa: E402

pytestmark = pytest.mark.torch
GB = 10**9
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.06 GiB is free."
)


def held(parameters: int, gradients: int, optimizer: int, activations: int) -> list[OwnedBytes]:
    return [
        OwnedBytes(name="parameters", nbytes=parameters * GB, largest=(("wte.weight", GB),)),
        OwnedBytes(name="gradients", nbytes=gradients * GB),
        OwnedBytes(name="optimizer state", nbytes=optimizer * GB),
        OwnedBytes(name="communication buffers", nbytes=0),
        OwnedBytes(
            name="activations", nbytes=activations * GB, largest=(("[8, 4096] bfloat16", GB),)
        ),
    ]


def test_what_helps_most_comes_first() -> None:
    layout = Layout.parse("dp4:microbatches=2")
    # The optimizer's state is large: ZeRO-3 frees most, then ZeRO-2 and 1.
    changes = oom.job_remedies(layout, held(16, 16, 40, 8), num_layers=8, rows=4)
    assert [(str(changed), saved // GB) for changed, saved in changes] == [
        ("dp4:microbatches=2,zero=3", 54),
        ("dp4:microbatches=2,zero=2", 42),
        ("dp4:microbatches=2,zero=1", 30),
        ("dp4:microbatches=2,recompute=full", 7),
        ("dp4:microbatches=4", 4),
    ]
    # Activations are: layers are recomputed.
    first, *_ = oom.job_remedies(layout, held(2, 2, 4, 60), num_layers=8, rows=4)
    assert (first[0].recompute, first[1]) == ("full", 52_500_000_000)
    # Nothing is left to change but the number of ranks.
    best = Layout.parse("dp2:zero=3,recompute=full")
    assert oom.job_remedies(best, held(2, 2, 4, 60), num_layers=8, rows=1) == []
    assert "larger pp or tp" in str(out_of_memory_report(0, AllocatorBytes(), [], [], oom.OTHER))


def test_the_report_has_the_numbers_the_owners_and_one_fix() -> None:
    state = AllocatorBytes(
        requested=int(2.5 * 2**30), allocated=70 * GB, reserved=76 * GB, capacity=80 * GB, free=GB
    )
    found = held(16, 16, 30, 8)
    changes = oom.job_remedies(Layout(dp=2), found, 8, 1)
    fixes = [(f"--layout {changed}", saved) for changed, saved in changes]
    error = out_of_memory_report(3, state, found, fixes, oom.OTHER)
    assert isinstance(error, RankMemoryError)
    first, *rest = error.message.splitlines()
    assert first == (
        "rank 3 ran out of memory: 2.68 GB requested, 70 GB allocated, 76 GB reserved "
        "(6 GB of it idle), 80 GB in all, 1 GB free"
    )
    assert rest[0].split() == ["optimizer", "state", "30", "GB"]
    assert "wte.weight 1 GB" in rest[1]
    assert error.hint == "--layout dp2:zero=3 (about 31 GB less on this rank)"


def test_the_requested_bytes_are_torchs() -> None:
    state = device_state(torch.OutOfMemoryError(CUDA), torch.device("cpu"))
    assert state == AllocatorBytes(requested=int(2.5 * 2**30))
    assert device_state(torch.OutOfMemoryError("none"), torch.device("cpu")) == AllocatorBytes()


def test_a_step_that_runs_out_names_its_tensors(ranks_of_one) -> None:
    job = ranks_of_one
    ids = torch.arange(16).view(2, 8) % 64
    batch = [{"input_ids": ids, "labels": ids}]
    job.parallel.forward_backward(batch)
    job.optimizer.state_tensors()
    saved = []

    def fail(module, args, output):
        saved.append(output)  # what backward would have kept
        raise torch.OutOfMemoryError(CUDA)

    layers = job.parallel.stages[0].module.get_submodule(job.plan.stages.layers)
    layers[-1].register_forward_hook(fail)
    try:
        job.parallel.forward_backward(batch)
    except torch.OutOfMemoryError as error:
        explained = oom.explained_out_of_memory(error, job)
    text = explained.message
    assert text.startswith("rank 0 ran out of memory: 2.68 GB requested")
    total = sum(p.nbytes for p in job.parallel.parameters())
    found = {owner.name: owner for owner in oom.job_owners(job, 0)}
    assert found["parameters"].nbytes == total
    assert found["parameters"].largest[0][0] in dict(job.parallel.named_parameters())
    assert found["optimizer state"].nbytes >= 2 * total  # two moments, and counts of steps
    assert found["activations"].nbytes > 0
    assert explained.hint is not None


def test_on_cuda_the_allocators_snapshot_is_written(ranks_of_one, monkeypatch, tmp_path) -> None:
    """And what cannot be written hides no report."""
    job, written = ranks_of_one, []
    monkeypatch.setattr(job.mesh, "device", torch.device("cuda", 0))
    stats = {"allocated_bytes.all.current": 3 << 30, "reserved_bytes.all.current": 5 << 30}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    error = torch.OutOfMemoryError(CUDA)
    text = oom.explained_out_of_memory(error, job, tmp_path).message
    assert written == [str(tmp_path / "memory-rank-0.pickle")]
    assert "3.22 GB allocated, 5.37 GB reserved (2.15 GB of it idle)" in text

    def full(path: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    assert oom.explained_out_of_memory(error, job, tmp_path).message == text


@pytest.fixture
def ranks_of_one(tmp_path):
    """A job of one rank in this process."""
    from hocket.launch import RankContext
    from hocket.training.build import build_rank_job

    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    spec = RunSpec(
        model="tiny",
        config=config,
        layout=Layout(microbatches=1),
        workload=Workload(seq_len=8, global_batch=2),
        options=dataclasses.replace(TrainOptions(), device="cpu"),
    )
    context = RankContext(
        rank=0, world_size=1, local_rank=0, device_kind="cpu", one_machine=True, attempt=0,
        _send=lambda message: None, _open_store=lambda timeout: None,
    )  # fmt: skip
    return build_rank_job(spec, context)


def test_the_ranks_entry_reports_it(ranks_of_one, monkeypatch, tmp_path) -> None:
    from types import SimpleNamespace

    from hocket.training import rank

    class Loop:
        def __init__(self, job, folder, context, faults) -> None: ...

        def run(self) -> None:
            raise torch.OutOfMemoryError(CUDA)

    spec = ranks_of_one.spec
    folder = SimpleNamespace(
        load=lambda **_: spec, schedule_file=None, path=tmp_path, checkpoints=tmp_path
    )
    monkeypatch.setattr(rank, "RunFolder", lambda path: folder)
    monkeypatch.setattr(rank, "read_schedule", lambda path: None)
    monkeypatch.setattr(rank, "build_rank_job", lambda *given: ranks_of_one)
    monkeypatch.setattr(rank, "Loop", Loop)
    heart = SimpleNamespace(allow=lambda seconds: None)
    context = SimpleNamespace(rank=1, expect=lambda seconds: None, heart=heart)
    with pytest.raises(RankMemoryError, match="rank 0 ran out of memory: 2"):
        rank.main(context, {"run": str(tmp_path)})
