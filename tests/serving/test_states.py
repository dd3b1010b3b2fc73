"""Recurrent layers are served from slots and snapshots, as plain transformers computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from hocket.jobs.serving import check  # noqa: E402
from hocket.models import skeleton  # noqa: E402
from hocket.models.context_scans import replace_scans  # noqa: E402
from hocket.models.proxy import proxy_of  # noqa: E402
from hocket.models.recurrent import (  # noqa: E402
    MixerCache,
    StateKey,
    cache_argument,
    mixers,
)
from hocket.models.samples import sample_config  # noqa: E402
from hocket.models.skeleton import config_of  # noqa: E402
from hocket.models.source import resolve_model  # noqa: E402
from hocket.runtime import record  # noqa: E402
from hocket.runtime.mesh import Axis, Mesh  # noqa: E402
from hocket.runtime.pipeline.stage import Stage  # noqa: E402
from hocket.serving.engine import attention  # noqa: E402
from hocket.serving.engine.attention_kernels import Choice, Chosen  # noqa: E402
from hocket.serving.engine.families import self_check  # noqa: E402
from hocket.serving.engine.runner import StageRunner  # noqa: E402
from hocket.serving.engine.staging import Staging  # noqa: E402
from hocket.serving.engine.states_context import ContextStates  # noqa: E402
from hocket.serving.scheduling.blocks import SnapshotPool  # noqa: E402
from hocket.simulation.nccl import Trace  # noqa: E402
from hocket.spec.errors import ModelError  # noqa: E402
from hocket.spec.layout import Layout  # noqa: E402
from tests.ranks import RankPool  # noqa: E402
from tests.runtime_pipeline.test_message_order import Group, Noted, complete  # noqa: E402
from tests.serving.paged import ToyScheduler, compare_pages  # noqa: E402
from tests.serving.recorded_graph import Recorder, reference_operator  # noqa: E402
from tests.serving.test_scheduler import Replica, limits, request  # noqa: E402

__all__ = ["reference_operator"]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

LFM2 = {
    "model_type": "lfm2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "conv_L_cache": 3,
    "max_position_embeddings": 64,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip
HYBRIDS = ["qwen3_next", "jamba", "falcon_h1", "nemotron_h", "zamba2", "mamba2", "falcon_mamba"]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_chunks_prefixes_and_preemptions_give_the_logits_of_a_plain_forward(kind: str) -> None:
    assert self_check(sample_config(kind)) < 1e-4


def test_short_convolutions_are_mixers_and_attention_with_a_state_is_none() -> None:
    model = skeleton.build_skeleton(LFM2)
    assert sorted(mixers(model)) == [f"model.layers.{i}.conv" for i in (0, 2, 3)]
    assert self_check(LFM2) < 1e-4
    with pytest.raises(ModelError, match="Rwkv"):
        self_check({"model_type": "rwkv"})


@pytest.mark.usefixtures("reference_operator")
@pytest.mark.parametrize("config", [LFM2, sample_config("falcon_h1")], ids=["lfm2", "falcon_h1"])
def test_a_decode_step_is_captured_and_replayed(config: dict[str, Any]) -> None:
    """As on a GPU: captured, nothing may read a value, and states stay where they are."""
    proxy = proxy_of(config_of(config))
    plain: Any = proxy.build(attention="eager")
    module: Any = proxy.build(attention=attention.NAME)
    module.load_state_dict(plain.state_dict())

    def chooser(kinds: Any, block: Any) -> Choice:
        return Choice(tuple(Chosen(kind, 1, "reference", {}) for kind in dict.fromkeys(kinds)), 4)

    runner = StageRunner(
        Stage(module), Mesh.single(), proxy.config, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=64, max_model_len=64, chooser=chooser, graphs=Recorder(),
    )  # fmt: skip
    graphs = runner.capture(96)
    assert graphs.reason == ""
    sequences = [list(range(3, 30)), [9, 8, 7, 21], [5]]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens])).logits[0] for tokens in sequences]
    scheduler = ToyScheduler(sequences, block_size=4, num_blocks=96, every_logit=True)
    scale = max(float(e.abs().max()) for e in expected)
    assert compare_pages(scheduler, runner.run, expected) < 1e-4 * scale
    assert graphs.replays > 0


@pytest.mark.ranks
@pytest.mark.train
@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "nemotron_h"])
def test_a_hybrid_answers_as_plain_transformers_over_stages_and_context_ranks(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """The first stage of two may have no attention at all; steps of 32 tokens are split over two
    context ranks, where scans can continue from another rank's."""
    file, folder = tmp_path / f"{kind}.json", tmp_path / "model"
    file.write_text(json.dumps(sample_config(kind)))
    check.prepare_checked_model(ranks.launcher, resolve_model(file), folder, proxy=True, seed=0)
    answers = check.answers_of(ranks.launcher, folder, "pp2", check.CheckedSizes())
    known = [answer["cached"] for answer in answers if answer["phase"] == "prefix reuse"]
    assert known[1] == 20, "the state before the last block's end was kept"
    assert known[3] == 16, "the state where two prompts part was kept"
    found = {"pp2": answers}
    size = check.CheckedSizes(longest=check.longest_of(Layout(cp=2)))
    if kind == "jamba":
        with pytest.raises(ModelError, match="a scan of its own"):
            check.answers_of(ranks.launcher, folder, "cp2", size)
    else:
        found["cp2"] = check.answers_of(ranks.launcher, folder, "cp2", size)
    for report in check.layout_reports(ranks.launcher, folder, found, tmp_path).values():
        assert report.ok, report.failures


class Handing(Group):
    """A process group of ranks that run one after the other, each after those it receives from."""

    def __init__(self, trace: Trace, ranks: tuple[int, ...], sent: Sent) -> None:
        super().__init__(trace, ranks)
        self.sent = sent

    def send(self, tensors: list[Any], peer: int, tag: int) -> Noted:
        self.sent.setdefault((self.trace.rank, peer), []).append(tensors[0].clone())
        return super().send(tensors, peer, tag)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Noted:
        found = self.sent[peer, self.trace.rank].pop(0)
        assert found.shape == tensors[0].shape
        tensors[0].copy_(found)
        return super().recv(tensors, peer, tag)


Sent = dict[tuple[int, int], list[torch.Tensor]]


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm3"])
def test_a_prompt_continues_on_the_next_rank_wherever_it_is_split(kind: str) -> None:
    """Outputs, last states and snapshots of two prompts, with one token a rank and more, fewer than
    a convolution reads and more. Messages complete by NCCL's rules, and each end of a rank inside
    a prompt costs the mixer's states once."""
    mixer = next(iter(mixers(proxy_of(config_of(sample_config(kind))).build().eval()).values()))
    replace_scans(mixer)

    def call(tokens: torch.Tensor, cache: MixerCache | None) -> torch.Tensor:
        return cast(torch.Tensor, mixer(tokens, **{cache_argument(mixer): cache}))

    width = next(m for m in mixer.modules() if isinstance(m, torch.nn.Linear)).in_features
    torch.manual_seed(0)
    hidden, notes = torch.randn(1, 17, width), MixerCache(None)
    with torch.no_grad():
        call(hidden, notes)
        prompts = [(0, 5, 0, ((2, 2),)), (5, 12, 1, ((4, 3), (7, 4)))]

        def pools() -> dict[StateKey, torch.Tensor]:
            return {key: torch.zeros(5, *shape) for key, (shape, _) in notes.shapes.items()}

        expected, outputs = pools(), []
        for first, count, slot, cuts in prompts:
            for length, place in (*cuts, (count, slot)):
                cache = MixerCache({k: p[place : place + 1] for k, p in expected.items()})
                out = call(hidden[:, first : first + length], cache)
            outputs.append(out)
        for each in (1, 2, 3, 7, 9, 16):
            size = -(-17 // each)
            sent: Sent = {}
            found, got = pools(), []
            traces = [Trace(rank) for rank in range(size)]
            for rank, trace in enumerate(traces):
                group: Any = Handing(trace, tuple(range(size)), sent)
                axis, own = Axis("cp", size, rank, tuple(range(size)), group), pools()
                step = ContextStates(
                    17, each, torch.zeros(0, dtype=torch.long), prompts, axis,
                    record.Recorder(rank), Staging(64, torch.device("cpu")),
                )  # fmt: skip
                tokens = torch.nn.functional.pad(hidden, (0, 0, 0, each))
                got.append(step.run(own, call, tokens[:, rank * each : (rank + 1) * each]))
                for first, count, slot, cuts in prompts:
                    for length, place in (*cuts, (count, slot)):
                        if (first + length - 1) // each == rank:
                            for key, pool in found.items():
                                pool[place] = own[key][place]
            complete(traces)
            each_state = sum(pool[0].numel() for pool in found.values())
            inside = sum(0 < rank * each != 5 for rank in range(size))
            numbers = [op.numel for trace in traces for op in trace.ops if op.name == "send"]
            assert sum(numbers) == inside * each_state
            torch.testing.assert_close(
                torch.cat(got, 1)[:, :17], torch.cat(outputs, 1), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- the scheduler's side, without torch ----------------------------------------------------------


def copies(replica: Replica) -> list[tuple[int, int, int]]:
    """Load, save and cut of all snapshots that plans name, until nothing is left to do."""
    found = []
    while not replica.scheduler.idle:
        plan = replica.step()
        if plan is not None:
            found += [(one.load, one.save, one.cut) for one in plan.snapshots]
    return found


def test_a_prompt_begins_with_the_state_of_one_before_it() -> None:
    replica = Replica(limits(num_snapshots=2, max_num_batched_tokens=64))
    prompt = list(range(10, 23))
    replica.add(request("a", prompt))
    assert copies(replica) == [(-1, 0, 12)]
    replica.add(request("b", prompt))
    assert copies(replica) == [(0, -1, 0)]
    assert replica.ended["b"].cached == 12
    # Blocks alone are of no use; where the prompts part, a state is kept for the next.
    replica.add(request("c", [*prompt[:8], 1, 2, 3, 4, 5]))
    assert copies(replica) == [(-1, 1, 8), (-1, 0, 12)]
    assert replica.ended["c"].cached == 0
    replica.add(request("d", [*prompt[:8], 6, 7]))
    assert copies(replica) == [(1, -1, 0)]
    assert replica.ended["d"].cached == 8


def test_without_snapshots_every_prompt_is_computed() -> None:
    replica = Replica(limits(num_snapshots=0))
    for name in "ab":
        replica.add(request(name, range(10, 23)))
        assert copies(replica) == []
        assert replica.ended[name].cached == 0


def test_a_snapshot_that_a_prompt_waits_to_begin_with_is_not_overwritten() -> None:
    pool = SnapshotPool(2)
    assert [pool.take(b"a"), pool.take(b"b"), pool.take(b"b")] == [0, 1, None]
    assert pool.hold(b"a") == 0
    assert pool.hold(b"b") == 1
    assert pool.take(b"c") is None
    pool.release(1)
    assert pool.take(b"c") == 1
    assert b"b" not in pool
    assert b"a" in pool
    pool.release(0)
    assert pool.take(b"d") == 0


def test_states_are_counted_in_the_memory_of_a_rank() -> None:
    proxy = proxy_of(config_of(LFM2))
    module: Any = proxy.build(attention=attention.NAME)
    runner = StageRunner(
        Stage(module), Mesh.single(), proxy.config, block_size=4, max_num_seqs=3,
        max_num_batched_tokens=16, max_model_len=32,
    )  # fmt: skip
    runner.num_snapshots = 2
    runner.allocate(8)
    held = sum(pool.numel() * pool.element_size() for pool in runner.states._every())
    assert held == runner.state_bytes > 0
