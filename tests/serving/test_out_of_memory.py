"""A served replica that runs out of memory: what its rank reports, from an error in a step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.cli.flags import parse_flags  # noqa: E402
from hocket.cli.serve import Serve  # noqa: E402
from hocket.ranks import serving as rank  # noqa: E402
from hocket.runtime.memory_report import OwnedBytes, out_of_memory_report  # noqa: E402
from hocket.serving.engine import out_of_memory as oom  # noqa: E402
from hocket.spec.errors import RankMemoryError  # noqa: E402
from hocket.spec.serving import ServeOptions  # noqa: E402
from tests.serving.test_paged import runner_of  # noqa: E402

pytestmark = pytest.mark.torch
GB = 10**9
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
OPTIONS = ServeOptions(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=4096)


def held(weights: int, cache: int, activations: int) -> list[OwnedBytes]:
    names = "weights", "key/value cache", "activations"
    sizes = weights, cache, activations
    return [OwnedBytes(name=n, nbytes=s * GB) for n, s in zip(names, sizes, strict=True)]


def test_what_frees_most_comes_first_and_every_fix_parses() -> None:
    large_cache = oom.server_remedies(OPTIONS, held(16, 50, 2), 2 * GB)
    assert large_cache == [
        ("--cache-memory 43000MB", 7 * GB),
        ("--max-num-batched-tokens 4096", 2 * GB),
    ]
    large_steps = oom.server_remedies(OPTIONS, held(16, 20, 30), 2 * GB)
    assert [flags for flags, _ in large_steps] == [
        "--max-num-batched-tokens 4096", "--cache-memory 16000MB"
    ]  # fmt: skip
    building = oom.server_remedies(OPTIONS, held(70, 0, 0), 2 * GB)
    assert [flags for flags, _ in building] == [
        "--max-num-batched-tokens 4096",
        "--max-num-seqs 32",
    ]
    for flags, _ in (*large_cache, *large_steps, *building):
        parse_flags(Serve, "serve", flags.split(), Serve(model="tiny"))
    smallest = dataclasses.replace(OPTIONS, max_num_batched_tokens=1, max_num_seqs=1)
    assert oom.server_remedies(smallest, held(70, 0, 0), 2 * GB) == []
    assert "larger pp or tp" in str(
        out_of_memory_report(0, oom.device_state(ValueError(), CPU), [], [], oom.OTHER)
    )


CPU = torch.device("cpu")


def test_a_step_that_runs_out_names_its_owners() -> None:
    _, runner = runner_of("llama", 4)
    runner.allocate(40)
    before = {owner.name: owner.nbytes for owner in oom.server_owners(CPU, 0)}
    assert before["key/value cache"] >= 40 * runner.bytes_per_block
    assert before["weights"] >= sum(p.nbytes for p in runner.stage.module.parameters())
    with (
        pytest.raises(RankMemoryError) as caught,
        oom.explaining(3, CPU, OPTIONS),
    ):
        raise torch.OutOfMemoryError(CUDA)
    lines = caught.value.message.splitlines()
    assert lines[0] == "rank 3 ran out of memory: 2.15 GB requested"
    assert {line.split("  ")[1] for line in lines[1:4]} >= {"weights", "key/value cache"}
    assert str(caught.value.hint).startswith("--max-num-batched-tokens 4096 (about")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="injected"), oom.explaining(0, CPU, OPTIONS):
        raise RuntimeError("injected")


def test_the_ranks_entry_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.serving.engine import channel
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunSpec, Workload
    from hocket.training import build

    spec = RunSpec(
        model="tiny", config={"model_type": "llama"}, layout=Layout(), serving=OPTIONS,
        workload=Workload(seq_len=8, global_batch=1),
    )  # fmt: skip

    def fail(*given: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(channel, "ChannelListener", lambda *given: None)
    monkeypatch.setattr(build, "join_world", lambda *given: SimpleNamespace(device=CPU))
    monkeypatch.setattr(rank, "_followers", lambda *given: {})
    monkeypatch.setattr(rank, "build_part", fail)
    context: Any = SimpleNamespace(rank=0, world_size=1, beat=lambda: None)
    with pytest.raises(RankMemoryError, match="rank 0 ran out of memory: 2"):
        rank.main(context, {"spec": spec.to_json(), "socket": "x", "token": "00"})
