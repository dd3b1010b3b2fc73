"""A job as a whole: verdict, memory by owner, collectives against theory, mistakes of the user."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.jobs import rehearsal_workers
from hocket.jobs import rehearse as job
from hocket.jobs.rehearsal_text import rehearsal_report
from hocket.jobs.rehearsal_workers import RehearsalWorkers, StepFailed, step_failed
from hocket.jobs.rehearse import (
    Rehearsed,
    RehearsedJob,
    prepare_rehearsal,
    rehearse_job,
    representatives,
    traces_of,
)
from hocket.jobs.request import request
from hocket.jobs.serving import rehearse as serving
from hocket.rehearsal import device
from hocket.simulation.nccl import RULES, simulate_nccl
from hocket.spec.errors import HocketError, ModelError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.rehearsal import OWNERS, RankRehearsal, RehearsalReport
from tests.rotation import part

pytestmark = pytest.mark.ranks

KEYS = {
    "eager", "lazy", "peak_bytes", "predicted_peak_bytes", "host_reads", "process_groups",
    "collectives", "launches_per_step", "ranks", "peak_bytes_by_owner", "host_read_places",
    "attention_calls", "generated",
}  # fmt: skip
LAYOUT = "dp2.pp2.tp2:microbatches=4"


def of(
    layout: str, model: str = "tiny-llama", rows: int = 1, gpu: str = "H100", **more: Any
) -> RehearsedJob:
    layers = more.pop("layers", None)
    given = {"seq_len": 64, "dtype": "bf16", "device": "cuda", **more}
    asked = request({"model": model, "layout": layout, **given})
    return prepare_rehearsal(asked, rows=rows, gpu=gpu, layers=layers)


@pytest.fixture(scope="module")
def found(workers: RehearsalWorkers) -> Rehearsed:
    return rehearse_job(of(LAYOUT), workers=workers)


def test_the_report_has_its_keys_and_an_inverse(found: Rehearsed) -> None:
    printed = found.report.to_json()
    assert json.loads(printed).keys() == KEYS
    assert RehearsalReport.from_json(printed) == found.report
    assert all(isinstance(n, int) for n in json.loads(printed)["peak_bytes"])
    assert json.loads(printed)["host_reads"] == 0


def test_a_job_completes_under_both_rules(found: Rehearsed) -> None:
    for rule in RULES:
        verdict = getattr(found.report, rule)
        assert verdict["ends"] is True
        assert verdict["waiting"] == []
        assert verdict["mismatches"] == []


def test_every_rank_has_a_row_whose_owners_add_up(found: Rehearsed) -> None:
    rows = found.report.peak_bytes
    assert [row["rank"] for row in rows] == list(range(8))
    for row in rows:
        assert row["total"] == sum(row[owner] for owner in OWNERS) > 0
    assert len(found.report.predicted_peak_bytes) == 8


def test_collectives_are_those_of_theory(found: Rehearsed) -> None:
    rows = found.report.collectives
    assert {row["axis"] for row in rows} == {"dp", "pp", "tp", "model", "world"}
    assert all(row["equal"] for row in rows), rows


def test_the_schedule_is_executed_as_it_stands(found: Rehearsed) -> None:
    for rank, executed in found.executed.items():
        stage = found.job.spec.layout.coordinate(rank)["pp"]
        line = [str(action) for action in found.job.schedule.ranks[stage] if action.kind in "FBIW"]
        assert executed.actions == line


def test_state_is_what_the_parameters_take(workers: RehearsalWorkers) -> None:
    """bf16 parameters, fp32 gradients, an fp32 master and two moments: 2, 4 and 12 bytes each."""
    hidden, inner, layers, vocab, kv = 128, 384, 4, 4096, 64
    each = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    count = 2 * vocab * hidden + layers * each + hidden
    tensors = 2 + layers * 9 + 1
    executed = rehearse_job(of("dp2"), workers=workers).executed[0]
    assert executed.standing["parameters"] == 2 * count
    assert executed.standing["gradients"] == 4 * count
    steps = executed.standing["optimizer"] - 12 * count
    assert 0 <= steps <= 4 * tensors, "AdamW counts its steps in fp32 scalars"
    assert executed.standing["activations"] < 100, "loss and norm are all that is left"


@pytest.mark.parametrize(
    ("layout", "more"),
    part(
        [
            ("dp2.tp2:sequence_parallel=true", {}),
            ("dp4:zero=2,microbatches=2", {}),
            ("dp2:zero=3", {"dropout": 0.1}),
            ("pp2:schedule=zb-v,virtual_stages=2,microbatches=4", {}),
            ("pp2.tp2:microbatches=2,recompute=full", {"model": "tiny-gpt2"}),
            ("tp2", {"dtype": "fp32"}),
            ("dp4.ep4", {"model": "tiny-mixtral", "expert_dispatch": "node:2"}),
            ("dp2.tp2:zero=3", {"lora_rank": 4, "quantize_base": "nf4"}),
        ],
        3,
    ),
)
def test_layouts_complete_and_communicate_as_in_theory(
    workers: RehearsalWorkers, layout: str, more: dict[str, Any]
) -> None:
    found = rehearse_job(of(layout, **more), ranks="all", workers=workers)
    assert found.report.ends
    assert len(found.executed) == found.job.spec.layout.world_size
    assert all(row["equal"] for row in found.report.collectives), found.report.collectives
    printed = rehearsal_report(found)
    assert "completes" in printed
    assert "DeepEP" not in printed
    options = dataclasses.replace(found.job.spec.options, expert_dispatch="deepep")
    spec = dataclasses.replace(found.job.spec, options=options)
    found = dataclasses.replace(found, job=dataclasses.replace(found.job, spec=spec))
    assert "DeepEP's kernels" in rehearsal_report(found)


@pytest.mark.parametrize(
    ("layout", "more"),
    part(
        [
            ("cp2", {"context_parallel": "ring"}),
            ("cp2", {"context_parallel": "ulysses"}),
            ("cp3", {"context_parallel": "ring", "seq_len": 96}),
            ("cp4", {}),
            ("pp2.cp2.tp2:microbatches=2", {}),
        ],
        2,
    ),
)
def test_context_parallel_layouts_complete_and_read_nothing(
    workers: RehearsalWorkers, layout: str, more: dict[str, Any]
) -> None:
    """A ring sends and receives in one batch: no order of the two among neighbours matters."""
    found = rehearse_job(of(layout, **more), workers=workers)
    for executed in found.executed.values():
        ring = [op for op in executed.ops if op[0] in ("send", "recv")]
        ring = [op for op in ring if "cp" in executed.axes[op[1]]]
        batches = Counter(op[7] for op in ring)
        assert bool(ring) == (more.get("context_parallel") != "ulysses")
        assert -1 not in batches
        assert set(batches.values()) <= {2}
        assert set(executed.attention) == {"flash"}, executed.attention
    assert found.report.ends
    assert all(row["equal"] for row in found.report.collectives), found.report.collectives
    assert found.report.host_reads == []
    _memory_is_predicted(found)


def test_attention_over_context_ranks_is_that_of_a_run_report(workers: RehearsalWorkers) -> None:
    """What a rehearsal counts by layer is what `attention.json` of a run would name."""
    import torch

    from hocket.models.attention_layers import kernel_rows
    from hocket.models.skeleton import build_skeleton

    found = rehearse_job(of("cp2", model="tiny-gemma3", context_parallel="ring"), workers=workers)
    (executed, *_) = found.executed.values()
    job = found.job.spec
    rows = kernel_rows(
        build_skeleton(dict(job.config), dtype=torch.bfloat16), dtype=torch.bfloat16,
        device=torch.device("meta"), seq_len=job.workload.seq_len, packed=False, context=True,
    )  # fmt: skip
    expected = {"flash": 0, "tiles": 0}
    for row in rows:
        expected[row["kernel"]] += 2 * row["layers"]  # parts of two ranks
    assert executed.attention == expected
    assert all(expected.values()), "layers of both kinds"


def _memory_is_predicted(found: Rehearsed) -> None:
    pairs = zip(found.report.predicted_peak_bytes, found.report.peak_bytes, strict=True)
    for predicted, row in pairs:
        assert predicted == pytest.approx(row["total"], rel=0.05)


@pytest.mark.parametrize(
    "layout",
    part(
        ["dp2.ep2", "dp2.ep2:recompute=full", "dp2.tp2.ep4.etp1", "dp2.pp2.ep2:microbatches=2"], 2
    ),
)
def test_expert_parallel_layouts_complete_and_read_once_a_layer(
    workers: RehearsalWorkers, layout: str
) -> None:
    """All-to-alls of uneven sizes take them from the host: one read for each forward of a layer,
    and none where it is recomputed."""
    found = rehearse_job(of(layout, model="tiny-mixtral"), workers=workers)
    assert found.report.ends
    assert all(row["equal"] for row in found.report.collectives), found.report.collectives
    job = found.job.spec
    reads = [read for executed in found.executed.values() for read in executed.host_reads]
    assert all("expert_parallel/dispatch.py" in read["where"] for read in reads), reads
    # One rank of each stage is executed, and stages need not have equally many layers.
    forwards = job.config["num_hidden_layers"] * (job.layout.microbatches or 1)
    assert sum(read["count"] for read in reads) == forwards
    _memory_is_predicted(found)


@pytest.mark.parametrize(
    "more", [{"dtype": "fp32"}, {"gpu": "A100-80"}, {"gpu": "A100-80", "layout": "dp2:zero=3"}]
)
def test_experts_read_nothing_whatever_the_dtype_and_gpu(
    workers: RehearsalWorkers, more: dict[str, Any]
) -> None:
    """torch's grouped matmul has a kernel for bf16 on Hopper and Blackwell alone."""
    found = rehearse_job(of(**{"layout": "dp2", "model": "tiny-mixtral", **more}), workers=workers)
    assert found.report.host_reads == []
    (executed,) = found.executed.values()
    layers = found.job.spec.config["num_hidden_layers"]
    assert executed.launches["grouped_mm"] == 4 * layers
    assert executed.launches["grouped_mm_weight_gradient"] == 2 * layers
    predicted, rehearsed = found.report.predicted_peak_bytes, found.report.peak_bytes
    assert predicted[0] == pytest.approx(rehearsed[0]["total"], rel=0.02)


@pytest.mark.parametrize(
    "more",
    [
        {"layout": "dp1"},
        {"layout": "tp2"},
        {"layout": "dp1:recompute=selective"},
        {"dtype": "bf16"},
    ],
)
def test_keys_and_values_repeated_for_query_heads_are_predicted(
    workers: RehearsalWorkers, more: dict[str, Any]
) -> None:
    """In fp32 no kernel of grouped-query attention reads a key for several query heads."""
    given = {"layout": "dp1", "dtype": "fp32", "seq_len": 512, "rows": 4, **more}
    found = rehearse_job(of(**given), workers=workers)
    rehearsed = [row["total"] for row in found.report.peak_bytes]
    assert found.report.predicted_peak_bytes == pytest.approx(rehearsed, rel=0.01)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zb-v,virtual_stages=2"])
def test_adapters_between_two_halves_of_a_backward(
    workers: RehearsalWorkers, schedule: str
) -> None:
    """What I frees and keeps of a layer is predicted norm by norm, with its adapters in place."""
    asked = of(
        f"pp2:schedule={schedule},microbatches=4",
        model="tiny-gemma3",
        rows=2,
        layers=4,
        lora_rank=4,
    )
    found = rehearse_job(asked, workers=workers)
    rehearsed = [row["total"] for row in found.report.peak_bytes]
    assert found.report.predicted_peak_bytes == pytest.approx(rehearsed, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("dp2.tp2:sequence_parallel=true,zero=3,recompute=full", {"dropout": 0.1}),
        ("pp2.tp2:schedule=zero-bubble,microbatches=2", {"model": "tiny-mixtral"}),
        ("dp2:zero=2,microbatches=2,offload=optimizer", {"model": "tiny-gpt2"}),
    ],
)
def test_the_shape_cache_changes_nothing(inside: Any, layout: str, more: dict[str, Any]) -> None:
    asked = of(layout, **more)
    payload = {
        "spec": asked.spec.to_json(),
        "schedule": str(asked.schedule) if asked.schedule.num_stages > 1 else "",
        "device": dataclasses.asdict(asked.device),
    }
    assert inside("uncached", job=payload, rank=asked.spec.layout.world_size - 1) == []


def test_a_replica_is_what_all_ranks_are(workers: RehearsalWorkers, found: Rehearsed) -> None:
    """Ranks that share an execution would have executed the same."""
    every = rehearse_job(found.job, ranks="all", workers=workers)
    assert _enqueued(found) == _enqueued(every)
    for one, other in zip(found.report.peak_bytes, every.report.peak_bytes, strict=True):
        assert one == other
    assert found.report.collectives == every.report.collectives


def _enqueued(found: Rehearsed) -> dict[int, list[Any]]:
    traces = traces_of(found.executed, found.stands_for)
    return {
        trace.rank: [
            (
                op.name,
                trace.group(op),
                op.numel,
                op.dtype,
                None if op.peer is None else trace.peer(op),
                op.blocks,
            )
            for op in trace.ops
        ]
        for trace in traces
    }


def test_a_job_that_hangs_is_reported_with_its_cycle(found: Rehearsed) -> None:
    """A rank that receives before it sends, where its neighbour does the same."""
    executed = copy.deepcopy(found.executed)
    for rank in executed.values():
        names = [op[0] for op in rank.ops]
        if (
            "send" in names
            and "recv" in names
            and found.job.spec.layout.coordinate(rank.rank)["pp"] == 0
        ):
            send, receive = names.index("send"), names.index("recv")
            ops = rank.ops
            ops[send], ops[receive] = ops[receive], ops[send]
    traces = traces_of(executed, found.stands_for)
    verdict = simulate_nccl(traces, "eager")
    assert not verdict.ends
    assert len(verdict.waiting) == 8
    assert len(verdict.cycle) >= 2
    hung = dataclasses.replace(found, verdicts={"eager": verdict})
    printed = rehearsal_report(hung)
    assert "8 of 8 ranks deadlock" in printed
    assert "-->" in printed


def test_one_rank_is_executed_without_a_verdict(workers: RehearsalWorkers) -> None:
    found = rehearse_job(of("dp2.pp2:microbatches=2"), ranks="3", workers=workers)
    assert list(found.executed) == [3]
    assert found.report.eager["ends"] is None
    assert [row["rank"] for row in found.report.peak_bytes] == [3]
    assert "unknown" in rehearsal_report(found)


def test_equal_ranks_share_an_execution() -> None:
    shared = representatives(of("dp4.pp2.tp2:microbatches=2"), "replica")
    assert len(shared) == 16
    assert set(shared.values()) == {0, 8}
    sharded = representatives(of("dp4.tp2:zero=3"), "replica")
    assert set(sharded.values()) == {0, 1}


def test_fewer_layers_are_rehearsed_when_asked_for() -> None:
    assert of("pp2", layers=2).spec.config["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "dp3.tp3"}, "attention heads do not divide over tp 3"),
        ({"layout": "dp1:recompute=norm+moe"}, "recompute"),
        ({"layout": "dp3.ep3", "model": "tiny-mixtral"}, "ep"),
        ({"layout": "dp2", "gpu": "H1000"}, "H1000"),
        ({"layout": "dp2", "gpu": "MI300X"}, "no CUDA"),
        ({"layout": "dp2", "gpu": "V100"}, "7.0"),
        ({"layout": "dp2", "gpu": "A100", "dtype": "fp8"}, "8.9"),
        ({"layout": "dp2", "rows": 0}, "rows is 0"),
        ({"layout": "pp5"}, "4 layers cannot be cut into 5 stages"),
        ({"layout": "dp2", "layers": 0}, "layers is 0"),
        ({"layout": "dp2", "model": "tiny-lama"}, "tiny-llama"),
        ({"layout": "dp2", "data_parallel": "threads"}, "threads"),
    ],
)
def test_what_cannot_be_is_rejected_before_a_worker_starts(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(HocketError, match=message):
        of(**change)


@pytest.mark.parametrize(
    ("job_of", "message", "hint"),
    [
        ({"layout": "pp99999999"}, "has 99,999,999 ranks, and at most 65,536", "--layout pp4"),
        ({"layout": "dp1:recompute=mlp", "model": "tiny-mixtral"}, "recompute is mlp: no layer",
         "--recompute full"),
        ({"layout": "dp4.tp99999998"}, "399,999,992 ranks", "--layout dp4.tp2"),
        ({"layout": "dp99999999"}, "has 99,999,999 ranks, and at most 65,536", "dp65536"),
        ({"layout": "dp3000.tp4.pp8"}, "96,000 ranks", "dp2048"),
        ({"layout": "dp2", "layers": 3_000_000}, "layers is 3,000,000;", "--layers 10000"),
        ({"layout": "dp2", "model": "tiny-gemma3", "layers": 10**17}, "000;", "--layers 10000"),
        ({"layout": "dp2:microbatches=20", "layers": 10_000}, "10,000, microb", "--layers 5000"),
        ({"layout": "pp2:microbatches=900000"}, "2, microbatches: 900,000", "--microbatches 50000"),
        ({"layout": "dp2", "rows": 10**9}, r"1,000,000,000 sequences .* 16.4 TB", "--rows 1"),
    ],
)  # fmt: skip
def test_a_rehearsal_that_would_not_end_is_rejected_before_a_worker_starts(
    job_of: dict[str, Any], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "RehearsalWorkers", None)
    with pytest.raises(HocketError, match=message) as caught:
        rehearse_job(of(**job_of))
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--serve --rank x", "--rank is of a training step"),
        ("--serve --seq-len 64 --layout tp2", "--seq-len is of a training step"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype is of a server"),
    ],
)
def test_flags_of_another_rehearsal_are_rejected(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "tiny-llama", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_sizes_that_contradict_each_other_are_one_line(
    workers: RehearsalWorkers, tmp_path: Path
) -> None:
    """OLMoE's norms are as wide as the hidden state, so a head size of another width cannot be."""
    config = {
        "model_type": "olmoe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot execute a step of") as caught:
        rehearse_job(of("dp1", model=str(tmp_path)), workers=workers)
    assert "Traceback" not in caught.value.message
    assert "modeling_olmoe.py" in caught.value.message
    assert "head_dim" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "step", "reason", "hint"),
    [
        ("xlstm", "train", r"float32 but found torch.bfloat16.*modeling_xlstm.py", "--dtype fp32"),
        ("jetmoe", "train", r"reads values of the GPU at .*modeling_jetmoe.py", "do not depend on"),
        ("prophetnet", "train", "does not compute the loss of its forward", None),
        ("mpt", "serve", r"fails on tokens of several sequences .*modeling_mpt.py", None),
        ("falcon", "serve", "FalconAttention computes attention itself", None),
        ("gpt_neo", "serve", "GPTNeoSelfAttention computes attention itself", None),
    ],
)
def test_what_a_family_cannot_do_is_rejected_with_its_reason(
    workers: RehearsalWorkers,
    inside: Any,
    tmp_path: Path,
    kind: str,
    step: str,
    reason: str,
    hint: str | None,
) -> None:
    """Not that of the operation at which fake tensors stopped."""
    (tmp_path / "config.json").write_text(json.dumps(inside("tiny_config", kind=kind)))

    def rehearsed() -> None:
        if step == "train":
            # All positions of a proxy model: ProphetNet fails on the last.
            rehearse_job(of("dp1", model=str(tmp_path), seq_len=128), workers=workers)
        else:
            spec = serving.replica_spec(str(tmp_path), Layout.parse("tp2"))
            serving.rehearse_replica(spec, workers=workers)

    with pytest.raises(HocketError, match=reason) as caught:
        rehearsed()
    assert not isinstance(caught.value, StepFailed)
    assert "Traceback" not in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("biogpt", "tp2"),  # its tensor plan is inferred
        ("bert", "dp1"),  # it has fewer positions than are traced
        ("gptj", "dp1"),  # computes scores itself, which backward keeps
        ("bamba", "tp2"),  # pads sequences to whole chunks, and keeps a state of each
    ],
)
def test_peak_memory_of_families_is_predicted(
    workers: RehearsalWorkers, inside: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(inside("tiny_config", kind=kind)))
    _memory_is_predicted(rehearse_job(of(layout, model=str(tmp_path)), workers=workers))


def test_parameters_that_ignore_the_default_dtype_are_trained(
    workers: RehearsalWorkers, inside: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(inside("tiny_config", kind="xlnet")))
    assert rehearse_job(of("dp1", model=str(tmp_path)), workers=workers).report.ends


@pytest.mark.parametrize("rank", ["8", "-1", "every", "1.5", "²"])
def test_an_unknown_rank_is_rejected(rank: str) -> None:
    with pytest.raises(OptionError, match=r"0 \.\. 7"):
        representatives(of(LAYOUT), rank)


def test_without_a_compiler_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(OptionError, match=r"(?s)no C\+\+ compiler was found.*apt install g\+\+"):
        rehearse_job(of("dp2"))


def test_a_compiler_that_is_too_slow_is_not_called_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(device, "_SECONDS", 0.1)
    (tmp_path / "version.py").touch()
    with pytest.raises(OptionError, match=r"slow took more than 0\.1 s to compile") as caught:
        device.compiled_device(tmp_path)
    assert caught.value.hint is not None
    assert "less busy" in caught.value.hint
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.usefixtures("warm_workers")
def test_the_command_prints_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["rehearse", "tiny-llama", "--layout", "dp2", "--seq-len", "64", "--json"])
    out = capfd.readouterr().out
    assert code == 0
    assert json.loads(out).keys() == KEYS


def test_the_error_of_one_worker_is_reported_while_another_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = (
        "import json, sys, time; task = json.loads(sys.stdin.readline())\n"
        "if task: time.sleep(60)\n"
        "print(json.dumps({'error': 'no compiler', 'hint': 'CXX', 'kind': 'OptionError'}))\n"
        "print(json.dumps({'done': 'load'}))"
    )
    monkeypatch.setattr(rehearsal_workers, "COMMAND", (sys.executable, "-c", command))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with RehearsalWorkers(2) as workers, pytest.raises(HocketError, match="no compiler"):
        list(workers.run([{}, {"slow": True}]))


def test_a_worker_ends_with_its_parent_in_the_middle_of_a_task() -> None:
    """In the middle of a task a worker does not read that its stdin has ended."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT_THAT_WAITS], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline, "the worker goes on without its parent"
        time.sleep(0.05)


_PARENT_THAT_WAITS = """
import json, os, subprocess, sys, time
process = subprocess.Popen(
    [sys.executable, "-m", "hocket.rehearsal.worker", str(os.getpid())],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
task = {"task": "call", "entry": "time:sleep", "arguments": {}}
process.stdin.write(json.dumps(task) + "\\n")  # ends at once: a call without its argument
process.stdin.flush()
assert "error" in json.loads(process.stdout.readline())  # so the worker is at work
process.stdin.write(json.dumps({**task, "entry": "signal:pause"}) + "\\n")
process.stdin.flush()
print(process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with signal SIGKILL", "free memory ("),
        ("raise MemoryError('std')", "ended with code 1: MemoryError: std", "free memory ("),
        ("import no_such_library", "code 1: ModuleNotFoundError: No module named", "hocket doctor"),
    ],
)
def test_a_worker_that_is_gone_is_one_line(
    monkeypatch: pytest.MonkeyPatch, command: str, message: str, hint: str
) -> None:
    monkeypatch.setattr(rehearsal_workers, "COMMAND", (sys.executable, "-c", command))
    with RehearsalWorkers(1) as workers, pytest.raises(HocketError) as caught:
        list(workers.run([{}]))
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)
    assert ("Traceback" in "".join(caught.value.__notes__)) == ("SIGKILL" not in message)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("RuntimeError: shape '[2, 3]' is invalid for input of size 8", "head_dim"),
        ("torch.AcceleratorError: CUDA error: driver version is insufficient", "hocket doctor"),
    ],
)
def test_the_hint_of_a_failed_step_is_about_sizes_where_the_error_is(line: str, hint: str) -> None:
    found = RankRehearsal(rank=0, error=f'  File "modeling_llama.py", line 3, in forward\n{line}')
    failed = step_failed("llama", found)
    assert line.partition(": ")[2] in failed.message
    assert hint in (failed.hint or "")
