"""A served replica rehearsed on fake CUDA tensors: what the host reads, what a graph holds.

Each rank is executed by a worker as `hocket rehearse --serve` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import pytest

from hocket.cli.rehearse import print_serving
from hocket.jobs.rehearsal_workers import RehearsalWorkers, equal_ranks
from hocket.jobs.serving import rehearse as job
from hocket.jobs.serving.rehearsal_fit import require_replica
from hocket.models.proxy import proxy_of
from hocket.models.samples import sample_config
from hocket.models.skeleton import config_of
from hocket.simulation.nccl import RULES, EnqueuedOp, Trace, simulate_nccl
from hocket.spec.errors import LayoutError, ModelError, OptionError, ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from hocket.spec.serving import ServeOptions
from tests.families import EXPERTS, SERVED
from tests.rotation import part

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
    ),
]


def replica(family: str, layout: str, **options: Any) -> RunSpec:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64}
    return RunSpec(
        model=family,
        config={**SERVED[family], "head_dim": 16},
        layout=Layout.parse(layout),
        workload=Workload(dtype="bf16"),
        options=TrainOptions(dropout=0.0, device="cuda"),
        command="serve",
        serving=ServeOptions(**{**sizes, **options}),
    )


@pytest.mark.parametrize(
    ("family", "layout", "kernels"),
    [("llama", "tp4", ["fa2"]), ("gemma3", "pp2", ["fa2", "fa2"])],
)
def test_no_step_reads_the_device_and_all_end(
    workers: RehearsalWorkers, family: str, layout: str, kernels: list[str]
) -> None:
    """Prefill, mixed and decode steps, whose requests sample in every way: no read inside a step,
    one result, decode legal to capture, and messages that end under both rules."""
    found = job.rehearse_replica(replica(family, layout, block_size=256), workers=workers)
    assert found.host_reads() == []
    assert found.ends
    assert found.fits
    # Of four tensor ranks one is executed for three, which hear what the first has sampled.
    assert list(found.ranks) == [0, 1]
    for rank, one in found.ranks.items():
        assert list(one["steps"]) == list(job.STEPS)
        assert one["graphs"]["reason"] == ""
        assert one["graphs"]["sizes"] == [1, 2, 4, 8]
        assert [row["kernel"] for row in one["attention"]] == kernels
        layers = sum(row["layers"] for row in one["attention"])
        tensor = Layout.parse(layout).tp
        first = one["stage"] == 0
        assert one["graphs"]["collectives"] == (tensor > 1) * (2 * layers + first)
        assert one["graphs"]["launches"] > 10 * layers
        samples = one["stage"] == Layout.parse(layout).pp - 1 and rank % tensor == 0
        reads = {name: step["result_reads"] for name, step in one["steps"].items()}
        assert set(reads.values()) == {int(samples)}
        # a replayed step is launched at once: what is left are its tables, and sampling
        decode, eager = one["steps"]["decode"], one["steps"]["decode eager"]
        assert eager["launches"] - decode["launches"] >= 0.9 * one["graphs"]["launches"]
        if not samples and tensor == 1:
            assert decode["launches"] <= 2
    report = json.loads(found.to_json())
    assert report["eager"]["ends"] is report["lazy"]["ends"] is True
    assert len(report["launches_per_step"]) == len(report["peak_bytes"]) == len(found.stands_for)
    assert report["host_reads"] == 0
    groups = report["process_groups"]  # as of a training job; once they were a number
    assert groups["per_rank"] == len(groups["groups"]) > 0
    assert layout[:2] in [name for row in groups["groups"] for name in row["axes"]]
    assert groups["groups"][0]["operations"] > 0
    assert report["predicted_peak_bytes"] == pytest.approx(report["peak_bytes"], rel=0.05)
    for one in found.ranks.values():
        predicted = found.predicted[one["stage"]]
        assert predicted["weights"] == pytest.approx(one["memory"]["weights"], rel=0.01)
        assert predicted["step"] == pytest.approx(one["memory"]["step"], rel=0.02)
        assert predicted["token"] * one["memory"]["cache_tokens"] == one["memory"]["cache"]
    assert all(name in found.text() for name in ("fa2", "CUDA graphs", "not seen"))


def test_a_replica_that_does_not_fit_is_rejected_with_the_nearest_layout(
    workers: RehearsalWorkers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `hocket serve --dry-run` and `hocket rehearse --serve` do before a rank starts."""
    spec = replica("llama", "tp1")
    found = job.rehearse_replica(spec, workers=workers)
    require_replica(found, spec)
    held = found.held(found.ranks[0])
    small = dataclasses.replace(found, device_memory=int(0.8 * held))
    monkeypatch.setattr(job, "rehearse_replica", lambda spec, gpu, on_phase: small)
    with pytest.raises(LayoutError, match=r"rank 0 needs .* of weights, .* H100") as caught:
        print_serving(spec, gpu="H100", as_json=True)
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == [held]
    assert caught.value.hint == "--layout tp2"
    tiny = dataclasses.replace(found, device_memory=1000)
    with pytest.raises(LayoutError) as caught:
        require_replica(tiny, spec)
    assert caught.value.hint is None


def test_a_replica_that_does_not_end_is_rejected(workers: RehearsalWorkers) -> None:
    """Ranks that wait for each other, as a picture, and ranks whose calls differ."""
    spec = replica("llama", "tp2")
    found = job.rehearse_replica(spec, workers=workers)
    group = ("tp", 0, 1)
    sends = [EnqueuedOp("send", group, rank, 64, "bfloat16", peer=1 - rank) for rank in (0, 1)]
    gathers = [EnqueuedOp("all-gather", group, rank, 64 + rank, "bfloat16") for rank in (0, 1)]
    for ops, message, line in (
        (sends, r"2 of 2 ranks deadlock on NCCL:\nrank 0 -- send .* --> rank 1", " --> rank 0"),
        (gathers, "call a collective differently: .*65 bfloat16", "calls do not match"),
    ):
        traces = [Trace(rank) for rank in (0, 1)]
        for trace, op in zip(traces, ops, strict=True):
            trace.enqueue(op)
            trace.wait(op)
        wrong = dataclasses.replace(
            found, verdicts={rule: simulate_nccl(traces, rule) for rule in RULES}
        )
        assert not wrong.ends
        assert line in wrong.text()
        with pytest.raises(ScheduleError, match=message):
            require_replica(wrong, spec)


def test_what_reads_the_device_is_named_and_not_captured(workers: RehearsalWorkers) -> None:
    """Where experts are picked on the host (DBRX, by transformers' own loop), a step runs eagerly,
    and each place is one line of the report; experts of one grouped matmul read nothing."""
    found = job.rehearse_replica(replica("mixtral", "tp1"), workers=workers)
    assert found.ranks[0]["graphs"]["sizes"] == [1, 2, 4, 8]
    assert found.host_reads() == []
    dbrx = proxy_of(config_of(sample_config("dbrx"))).config.to_dict()
    spec = dataclasses.replace(replica("mixtral", "tp1"), model="dbrx", config=dbrx)
    found = job.rehearse_replica(spec, workers=workers)
    graphs = found.ranks[0]["graphs"]
    assert graphs["sizes"] == []
    assert "modeling_dbrx.py:" in graphs["reason"]
    (line,) = [line for line in found.text().splitlines() if line.startswith("    nonzero at")]
    assert "modeling_dbrx.py:" in line
    assert line.endswith("(prefill, mixed, decode, decode eager)")


@pytest.mark.parametrize("layout", ["dp2.ep2", "tp2.ep2.etp1", "dp2.pp2.ep2"])
def test_experts_over_ranks_read_nothing_and_are_captured(
    workers: RehearsalWorkers, layout: str
) -> None:
    """Where a data rank is idle, too."""
    found = job.rehearse_replica(replica("mixtral", layout), workers=workers)
    assert found.host_reads() == []
    assert found.ends
    assert found.fits
    for one in found.ranks.values():
        assert one["graphs"]["reason"] == ""
        assert one["graphs"]["sizes"] == [1, 2, 4, 8]
        assert one["graphs"]["collectives"] > 0
        assert ("uneven" in one["steps"]) == layout.startswith("dp2")
        assert one["largest"] == {"tokens": 64, "host_reads": 0}


EIGHT_BITS = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "gpt_oss": {"intermediate_size": 48},
    "deepseek_v3": {
        "moe_intermediate_size": 32, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32
    },
}  # fmt: skip


IN_8_BITS = [
    ("mixtral", "tp2"),
    ("mixtral", "dp2.pp2.ep2"),
    ("qwen3_moe", "dp2.ep2"),
    ("gpt_oss", "tp1"),
    ("deepseek_v3", "tp2.ep2.etp1"),
]


@pytest.mark.parametrize(("family", "layout"), part(IN_8_BITS, 2))
def test_experts_in_8_bits_read_nothing_and_are_captured(
    workers: RehearsalWorkers, family: str, layout: str
) -> None:
    """Their two matmuls a layer quantize their rows first; memory is as predicted."""
    config = {**SERVED.get(family, EXPERTS.get(family, {})), **EIGHT_BITS[family]}
    spec = dataclasses.replace(replica("mixtral", layout), model=family, config=config)
    assert spec.serving is not None
    found = {
        quantization: job.rehearse_replica(
            dataclasses.replace(
                spec, serving=dataclasses.replace(spec.serving, quantization=quantization)
            ),
            workers=workers,
        )
        for quantization in (None, "fp8")
    }
    few, plain = found["fp8"], found[None]
    assert few.host_reads() == []
    assert few.ends
    for rank, one in few.ranks.items():
        other = plain.ranks[rank]
        assert one["graphs"]["reason"] == ""
        assert one["graphs"]["sizes"] == [1, 2, 4, 8]
        assert one["graphs"]["launches"] > other["graphs"]["launches"]
        assert one["memory"]["weights"] < other["memory"]["weights"]
        assert one["memory"]["step"] == pytest.approx(other["memory"]["step"], rel=0.05)
        predicted = few.predicted[one["stage"]]
        assert predicted["weights"] == pytest.approx(one["memory"]["weights"], rel=0.05)
        assert predicted["step"] == pytest.approx(one["memory"]["step"], rel=0.05)
        peak = predicted["weights"] + predicted["step"] + one["memory"]["cache"]
        assert peak == pytest.approx(few.held(one), rel=0.05)


def test_a_long_prompt_is_dispatched_with_one_read_a_layer(workers: RehearsalWorkers) -> None:
    found = job.rehearse_replica(
        replica("mixtral", "dp2.ep2", max_num_batched_tokens=8192), workers=workers
    )
    assert found.host_reads() == []
    layers = SERVED["mixtral"]["num_hidden_layers"]
    for one in found.ranks.values():
        assert one["largest"] == {"tokens": 8192, "host_reads": layers}
        predicted = found.predicted[one["stage"]]
        assert predicted["step"] == pytest.approx(one["memory"]["step"], rel=0.05)
    assert f"8,192 tokens, {layers} host reads" in found.text()


def test_the_largest_step_of_experts_is_predicted(workers: RehearsalWorkers) -> None:
    """Their tokens are copied for each expert, and their outputs are weighted in fp32."""
    found = job.rehearse_replica(
        replica("mixtral", "tp2", max_num_batched_tokens=1024), workers=workers
    )
    (predicted,) = found.predicted
    for one in found.ranks.values():
        assert predicted["step"] == pytest.approx(one["memory"]["step"], rel=0.05)


def test_layers_that_no_library_takes_are_read_by_triton(workers: RehearsalWorkers) -> None:
    spec = replica("llama", "tp1")
    spec = RunSpec.from_json(spec.to_json().replace('"dtype": "bf16"', '"dtype": "fp32"'))
    found = job.rehearse_replica(spec, workers=workers)
    (one,) = found.ranks.values()
    (row,) = one["attention"]
    assert row["kernel"] == "triton"
    assert row["block_size"] == 16
    assert row["rejected"]["fa2"] == "does not compute in float32"


@pytest.mark.parametrize("layout", ["tp2", "dp2.ep2"])
def test_a_cache_in_8_bits_holds_twice_the_tokens(workers: RehearsalWorkers, layout: str) -> None:
    """Pages of half the bytes, read by the Triton kernel; captured, nothing read on the host."""
    found = {
        kind: job.rehearse_replica(
            replica("mixtral", layout, kv_cache_dtype=kind, block_size=256), workers=workers
        )
        for kind in ("auto", "fp8")
    }
    few, plain = found["fp8"], found["auto"]
    assert few.ends
    assert few.host_reads() == []
    for rank, one in few.ranks.items():
        other = plain.ranks[rank]["memory"]
        assert one["graphs"]["reason"] == ""
        (row,) = one["attention"]
        assert (row["kernel"], row["cached"]) == ("triton", "float8_e4m3fn")
        assert row["rejected"]["fa2"] == "does not read a cache in 8 bits"
        memory, predicted = one["memory"], few.predicted[one["stage"]]
        assert predicted["token"] * memory["cache_tokens"] == memory["cache"]
        assert 2 * memory["cache"] * other["cache_tokens"] == (
            other["cache"] * memory["cache_tokens"]
        )
        assert predicted["step"] == pytest.approx(memory["step"], rel=0.05)


def test_a_gpu_without_8_bit_floats_has_no_such_cache() -> None:
    with pytest.raises(OptionError, match=r"compute capability 8\.0"):
        job.rehearse_replica(replica("llama", "tp1", kv_cache_dtype="fp8"), gpu="A100")


def test_equal_tensor_ranks_are_executed_once() -> None:
    """The first samples. The last shard of a vocabulary that tp does not divide is smaller."""
    layout = Layout.parse("tp4.pp2")
    assert equal_ranks(layout, 64, first=True, data=True) == {
        0: 0, 1: 1, 2: 1, 3: 1, 4: 4, 5: 5, 6: 5, 7: 5,
    }  # fmt: skip
    assert equal_ranks(layout, 62, first=True, data=True) == {
        0: 0, 1: 1, 2: 1, 3: 3, 4: 4, 5: 5, 6: 5, 7: 7,
    }  # fmt: skip
    experts = equal_ranks(Layout.parse("dp2.tp4.ep2"), 64, first=True, data=True)
    assert len(set(experts.values())) == 4


@pytest.mark.parametrize(
    ("family", "layout", "kernels"),
    [
        ("llama", "cp2", ["triton"]),
        ("llama", "tp2.cp2", ["triton"]),
        ("deepseek_v3", "pp2.cp2", ["latent"]),
        ("qwen3_next", "cp2", ["triton"]),
    ],
)
def test_context_ranks_end_read_nothing_and_hold_their_shard(
    workers: RehearsalWorkers, family: str, layout: str, kernels: list[str]
) -> None:
    """Steps that are split and steps that are not: nothing waits, decode is captured with its
    collectives."""
    spec = replica("llama", layout, max_num_batched_tokens=512, num_blocks=None)
    if family != "llama":
        config = proxy_of(config_of(sample_config(family))).config.to_dict()
        spec = dataclasses.replace(spec, config={**config, "max_position_embeddings": 64})
    found = job.rehearse_replica(spec, workers=workers)
    assert found.ends
    assert found.host_reads() == []
    assert found.predicted is not None
    for one in found.ranks.values():
        memory, predicted = one["memory"], found.predicted[one["stage"]]
        assert one["graphs"]["reason"] == ""
        assert one["graphs"]["sizes"] == [1, 2, 4, 8]
        attends = sum(row["layers"] for row in one["attention"])
        assert [row["kernel"] for row in one["attention"]] == kernels
        assert memory["block_size"] == 32
        # of each layer that attends, logarithms are gathered and what was attended to is summed
        assert one["graphs"]["collectives"] >= 2 * attends
        assert predicted["weights"] == pytest.approx(memory["weights"], rel=0.01)
        assert predicted["token"] * memory["cache_tokens"] == memory["cache"]


def test_a_block_that_no_context_rank_reads_a_part_of_names_one(workers: RehearsalWorkers) -> None:
    with pytest.raises(ModelError, match="multiple of 32 tokens over cp 2, not 16") as caught:
        job.rehearse_replica(replica("llama", "cp2", block_size=16), workers=workers)
    assert caught.value.hint == "--block-size 32"
