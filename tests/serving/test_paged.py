"""Attention from pages, alone and under the models' own code, equals what a plain forward makes."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.models import skeleton  # noqa: E402
from hocket.models.samples import sample_config  # noqa: E402
from hocket.runtime.mesh import Mesh  # noqa: E402
from hocket.runtime.native.kernels import CpuKernels  # noqa: E402
from hocket.runtime.pipeline.stage import Stage  # noqa: E402
from hocket.serving.engine import attention, attention_cpu  # noqa: E402
from hocket.serving.engine.attention import Options  # noqa: E402
from hocket.serving.engine.attention_cpu import CpuAttention  # noqa: E402
from hocket.serving.engine.attention_cuda import CudaAttention  # noqa: E402
from hocket.serving.engine.attention_kernels import Choice, Chosen  # noqa: E402
from hocket.serving.engine.attention_step import indices  # noqa: E402
from hocket.serving.engine.cache import BlockTables, LayerShape, PagedCache  # noqa: E402
from hocket.serving.engine.device_step import DeviceStep, DeviceTables  # noqa: E402
from hocket.serving.engine.families import refuse, self_check  # noqa: E402
from hocket.serving.engine.graphs import DecodeGraphs, captured_rows  # noqa: E402
from hocket.serving.engine.projections import (  # noqa: E402
    MergedLinear,
    inputs_first,
    lay_inputs_first,
    merge_projections,
    unmerge_wasted,
)
from hocket.serving.engine.runner import StageRunner  # noqa: E402
from hocket.serving.request import SamplingParams  # noqa: E402
from hocket.serving.scheduling.admission import Admission  # noqa: E402
from hocket.serving.scheduling.step import LAST, UNKNOWN, BatchRow, StepPlan  # noqa: E402
from hocket.spec.errors import ModelError  # noqa: E402
from tests.families import EXPERTS, FAMILIES, PROMPTS, SERVED, whole_model  # noqa: E402
from tests.rotation import part  # noqa: E402
from tests.serving.paged import ToyScheduler, compare_pages  # noqa: E402
from tests.serving.recorded_graph import Recorder, reference_operator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

__all__ = ["reference_operator"]

PAGED = [family for family in SERVED if family != "bloom"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- attention alone ------------------------------------------------------------------------


def naive(q: Any, k: Any, v: Any, options: Options) -> Any:
    """One sequence, all of it: q [S, A, D], k and v [S, K, .] to [S, A, D of v], in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("sad,tad->ast", q, k) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    at = torch.arange(q.shape[0])
    hidden = at > at.unsqueeze(1)
    if options.window is not None:
        hidden |= at <= at.unsqueeze(1) - options.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : q.shape[0]]
    return torch.einsum("ast,tad->sad", weights, v)


SHAPES = [
    (LayerShape(4, 2, 8, 8, torch.float32), Options(0.3)),
    (LayerShape(4, 4, 8, 8, torch.float32), Options(0.3, window=5)),
    (LayerShape(6, 1, 8, 8, torch.float32), Options(0.3, softcap=2.0)),
    (LayerShape(4, 2, 8, 8, torch.float32), Options(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0]))),
    (LayerShape(4, 4, 12, 8, torch.float32), Options(0.3)),  # multi-head latent attention
    (
        LayerShape(4, 2, 8, 8, torch.float32),
        Options(0.3, window=7, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0])),
    ),
    (LayerShape(4, 2, 16, 16, torch.bfloat16), Options(0.25)),
]


def cpu_attention(cache: PagedCache, step: Any) -> CpuAttention:
    return CpuAttention(cache, step)


def reference(cache: PagedCache, step: Any) -> CudaAttention:
    """What a GPU's kernels are held to in their trial, over the indices that they get."""
    counts = [1] * step.num_decode + [chunk.count for chunk in step.chunks]
    lengths = [*step.lengths.tolist(), *(c.start + c.count for c in step.chunks)]
    most = max([step.tables.shape[1], *(c.blocks.shape[0] for c in step.chunks)])
    tables = torch.zeros(len(counts), most, dtype=torch.int32)
    tables[: step.num_decode, : step.tables.shape[1]] = step.tables
    for row, chunk in enumerate(step.chunks, step.num_decode):
        tables[row, : chunk.blocks.shape[0]] = chunk.blocks
    begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    made = DeviceStep(
        step.tokens, step.positions, step.places, step.wanted, begins,
        torch.tensor(lengths, dtype=torch.int32), tables, max(counts), max(lengths),
    )  # fmt: skip
    return CudaAttention(cache, made, ["reference"])


def compiled(cache: PagedCache, step: Any) -> CpuAttention:
    return CpuAttention(cache, step, CpuKernels.load())


@pytest.mark.parametrize("attend", [cpu_attention, compiled, reference])
@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_attention_equals_the_definition(
    case: int, block_size: int, attend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cpu, "_COPIED_BYTES", 1000)  # several copies a step
    shape, options = SHAPES[case]
    torch.manual_seed(case)
    lengths = [37, 9, 1, 20, 31]
    whole = [
        tuple(
            torch.randn(n, heads, width).to(shape.dtype)
            for heads, width in (
                (shape.num_heads, shape.key_size),
                (shape.num_kv_heads, shape.key_size),
                (shape.num_kv_heads, shape.value_size),
            )
        )
        for n in lengths
    ]
    whole[3] = tuple(torch.cat([a[:20], b[20:]]) for a, b in zip(whole[0], whole[3], strict=True))
    expected = [naive(*sequence, options) for sequence in whole]
    cache = PagedCache(
        [shape], 64, block_size, torch.device("cpu"), heads_first=attend is not reference
    )
    for pool in (*cache.keys, *cache.values):
        pool.normal_()  # what earlier sequences left behind
    tables = BlockTables(5, 64)
    scheduler = ToyScheduler(
        [[0] * n for n in lengths],
        block_size=block_size,
        num_blocks=64,
        seed=case,
        chunks=(1, 1, 4),
    )
    tolerance = 0.05 if shape.dtype == torch.bfloat16 else 2e-5

    def run(only: set[int] | None) -> int:
        steps = 0
        while (plan := scheduler.plan(only)) is not None:
            tables.apply(plan)
            step = indices(plan, tables, block_size)
            parts = [
                torch.cat([whole[r.slot][i][r.start : r.start + r.count] for r in plan.rows])
                .transpose(0, 1)
                .unsqueeze(0)
                for i in range(3)
            ]
            found = attend(cache, step).attend(torch.nn.Module(), *parts, options)[0]
            want = torch.cat([expected[r.slot][r.start : r.start + r.count] for r in plan.rows])
            assert float((found - want).abs().max()) < tolerance, plan.rows
            steps += 1
        return steps

    run({0})
    scheduler.share(0, 3, 20 // block_size)
    run({1})
    scheduler.preempt(1)
    assert run(None) > 5


@pytest.mark.parametrize("kernels", [None, "compiled"])
@pytest.mark.parametrize("strided", list(itertools.product((False, True), repeat=3)))
def test_tensors_of_any_strides_are_attended_equally(
    strided: tuple[bool, ...], kernels: str | None
) -> None:
    """An all-gather along the last dimension returns a view whose last stride is not 1, which the
    operator for whole sequences reads as if it were."""
    shape, options = LayerShape(4, 2, 16, 16, torch.float32), Options(0.25)
    torch.manual_seed(2)
    dense = [torch.randn(1, heads, 21, 16) for heads in (4, 2, 2)]
    given = [
        x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1) if moved else x
        for x, moved in zip(dense, strided, strict=True)
    ]
    assert [x.stride(-1) != 1 for x in given] == list(strided)
    found = []
    for tensors in (dense, given):
        cache = PagedCache([shape], 8, 4, torch.device("cpu"))
        tables = BlockTables(2, 8)
        out = []
        for begin, end in ((0, 9), (9, 20), (20, 21)):  # a prompt, its next chunk, a decode step
            blocks = list(range(-(-begin // 4), -(-end // 4)))
            plan = StepPlan(0, [BatchRow(0, begin, end - begin, LAST, blocks)], [0] * (end - begin))
            tables.apply(plan)
            step = indices(plan, tables, 4)
            attending = CpuAttention(cache, step, CpuKernels.load() if kernels else None)
            part = [x[:, :, begin:end] for x in tensors]
            out.append(attending.attend(torch.nn.Module(), *part, options)[0])
        found.append(torch.cat(out))
    assert torch.equal(*found)
    expected = naive(*(x[0].transpose(0, 1) for x in dense), options)
    assert float((found[1] - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("attend", [cpu_attention, compiled])
def test_blocks_of_other_sequences_are_not_read(attend: Any) -> None:
    """Tables are padded with block 0, in which another sequence may have left what is no number."""
    cache = PagedCache([LayerShape(4, 2, 8, 8, torch.float32)], 8, 2, torch.device("cpu"))
    tables = BlockTables(2, 4)
    blocks = [[3, 5, 1, 7], [2]]
    rows = [BatchRow(slot, 2 * len(held) - 1, 1, LAST, held) for slot, held in enumerate(blocks)]
    plan = StepPlan(0, rows, [0, 0])
    tables.apply(plan)
    for pool in (*cache.keys, *cache.values):
        pool[[0, 4, 6]] = float("nan")
    attending = attend(cache, indices(plan, tables, 2))
    key, value = torch.randn(2, 1, 2, 2, 8)
    found = attending.attend(torch.nn.Module(), torch.randn(1, 4, 2, 8), key, value, Options(0.3))
    assert found.isfinite().all()


# --- whole models ---------------------------------------------------------------------------


def module_of(family: str) -> tuple[Any, Any]:
    """The whole model, and another of its values that attends from pages."""
    plain = whole_model(family)
    module: Any = skeleton.build_skeleton(
        SERVED[family], device="cpu", dropout=0.0, attention=attention.NAME
    )
    module.load_state_dict(plain.state_dict())
    own = dict(module.named_buffers())
    for name, buffer in plain.named_buffers():
        own[name].copy_(buffer)
    return plain, module


def runner_of(family: str, block_size: int, **options: Any) -> tuple[Any, StageRunner]:
    plain, module = module_of(family)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, **options}
    runner = StageRunner(
        Stage(module), Mesh.single(), module.config, block_size=block_size, **limits
    )
    if "chooser" not in options:
        runner.allocate(96)
    return plain, runner


@pytest.mark.parametrize(
    ("family", "compiled"), [(f, True) for f in PAGED] + [("llama", False), ("gemma3", False)]
)
def test_greedy_decoding_equals_generate(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(CpuKernels, "load", lambda: None)
    new = 10
    for block_size, chunks in ((4, (1, 5)), (16, (64,))):
        plain, runner = runner_of(family, block_size)
        scheduler = ToyScheduler(PROMPTS, block_size=block_size, num_blocks=96, chunks=chunks)
        preempted = False
        for _ in range(200):
            plan = scheduler.plan()
            if plan is None:
                break
            logits = runner.run(plan)
            at = 0
            for row in plan.rows:
                if row.num_logits:
                    tokens = scheduler.sequences[row.slot]
                    if len(tokens) < len(PROMPTS[row.slot]) + new:
                        tokens.append(int(logits[at].argmax()))
                    at += 1
            if not preempted and len(scheduler.sequences[0]) == len(PROMPTS[0]) + 4:
                preempted = True
                scheduler.preempt(0)
        assert preempted
        for prompt, tokens in zip(PROMPTS, scheduler.sequences, strict=True):
            expected = plain.generate(
                torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=-1,
                pad_token_id=0,
            )[0]  # fmt: skip
            assert tokens == expected.tolist(), (block_size, chunks)


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "phi3"])
def test_every_logit_of_shared_and_chunked_prompts(family: str) -> None:
    plain, runner = runner_of(family, 4)
    sequences = [list(range(3, 40)), [*range(3, 19), 50, 51, 52], [9]]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens])).logits[0] for tokens in sequences]
    scheduler = ToyScheduler(sequences, block_size=4, num_blocks=96, every_logit=True)
    scale = max(float(e.abs().max()) for e in expected)
    worst = compare_pages(scheduler, runner.run, expected, {0, 2})
    scheduler.share(0, 1, 4)
    assert max(worst, compare_pages(scheduler, runner.run, expected)) < 1e-5 * scale


def test_a_step_without_logits_gives_none() -> None:
    _, runner = runner_of("llama", 4)
    scheduler = ToyScheduler([[5] * 20], block_size=4, num_blocks=96, chunks=(7,))
    plan = scheduler.plan()
    assert plan is not None
    assert runner.run(plan).shape == (0, 64)


def test_a_step_takes_the_threads_that_it_is_worth() -> None:
    _, runner = runner_of("llama", 4, threads=2)
    weights = [p.numel() for p in runner.stage.module.parameters() if p.dim() > 1]
    assert (runner._wide - 1) * sum(weights) / len(weights) < 1_500_000
    assert runner._wide * sum(weights) / len(weights) >= 1_500_000
    runner._wide = 12
    plain = whole_model("llama")
    sequences = [list(range(3, 43)), [9, 8, 7]]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens])).logits[0] for tokens in sequences]
    scheduler = ToyScheduler(
        sequences, block_size=4, num_blocks=96, every_logit=True, chunks=(1, 20)
    )
    used: dict[int, int] = {}

    def run(plan: StepPlan) -> Any:
        found = runner.run(plan)
        used[len(plan.tokens)] = torch.get_num_threads()
        return found

    assert compare_pages(scheduler, run, expected) < 1e-5 * max(
        float(e.abs().max()) for e in expected
    )
    assert {threads for tokens, threads in used.items() if tokens >= 12} == {2}
    assert {threads for tokens, threads in used.items() if tokens < 12} == {1}


def test_bytes_of_a_block_are_those_of_the_cache() -> None:
    _, runner = runner_of("llama", 4)
    cache = runner.cache
    assert cache is not None
    held = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert held == 96 * runner.bytes_per_block


def test_self_check_tells_what_cannot_be_served() -> None:
    assert self_check(FAMILIES["gemma3"]) < 1e-5
    for config, reason in (
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}, "BloomAttention"),
        ({"model_type": "rwkv"}, "Rwkv"),
        ({"model_type": "bert", "num_hidden_layers": 2}, "other logits"),  # sees later tokens
    ):
        with pytest.raises(ModelError, match=reason):
            self_check(config)


def served_types() -> list[str]:
    """Types whose server is equal in one process, by the table of docs/reference."""
    table = Path(__file__).parents[2] / "docs/reference/served-families.jsonl"
    _, *rows = map(json.loads, table.read_text().splitlines())
    return [
        row["kind"]
        for row in rows
        if any(mark == "=" and "a" in columns for mark, _, columns, *_ in row["cells"])
        and not row["kind"].endswith("+")
    ]


@pytest.mark.parametrize("kind", part(served_types(), 16))
def test_types_of_the_table_are_still_served(kind: str) -> None:
    assert self_check(sample_config(kind)) < 1e-3


def test_a_layer_without_the_window_of_its_model_sees_all_tokens() -> None:
    """EXAONE 4 hands None to attention in some layers, and keeps the window in all modules."""
    mixed = ["sliding_attention", "full_attention"] * 2
    config = {**FAMILIES["llama"], "model_type": "exaone4", "sliding_window": 4}
    assert self_check({**config, "num_hidden_layers": 4, "layer_types": mixed}) < 1e-5


def test_a_window_that_only_masks_are_made_of_is_followed() -> None:
    """Qwen2-MoE keeps it in its module and does not hand it to attention."""
    config = {
        **EXPERTS["qwen3_moe"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
    }
    assert self_check({**config, "use_sliding_window": True, "sliding_window": 4}) < 1e-5


def test_chunked_attention_is_served_as_far_as_a_chunk() -> None:
    config = skeleton.config_of(
        {"model_type": "llama4_text", "attention_chunk_size": 32, "num_hidden_layers": 4}
    )
    module = torch.nn.Linear(1, 1)
    refuse(config, module, 32)
    with pytest.raises(ModelError, match="chunks of 32") as caught:
        refuse(config, module, 33)
    assert caught.value.hint == "--max-model-len 32"


def test_frequencies_that_change_with_the_longest_sequence_bound_the_length() -> None:
    long = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 16,
    }  # fmt: skip
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for family, rope, bound in (("phi3", long, 16), ("llama", dynamic, 128)):
        values = {**FAMILIES[family], "rope_parameters": rope}
        if family == "phi3":
            values["original_max_position_embeddings"] = bound
        config = skeleton.config_of(values)
        refuse(config, torch.nn.Linear(1, 1), bound)
        with pytest.raises(ModelError, match="rotary frequencies") as caught:
            refuse(config, torch.nn.Linear(1, 1), bound + 1)
        assert caught.value.hint == f"--max-model-len {bound}"


# --- merged projections ---------------------------------------------------------------------


def test_projections_merge_without_being_held_twice() -> None:
    plain = whole_model("llama_tied")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        expected = plain(ids).logits
    before = {name: p.clone() for name, p in plain.named_parameters()}
    merges = merge_projections(plain)
    assert len(merges) == 2 * 4
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert unmerge_wasted(merges) == 8
    after = dict(plain.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    layer = plain.model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in
                (layer.q_proj, layer.k_proj, layer.v_proj)}  # fmt: skip
    assert len(storages) == 1


def test_weights_are_laid_out_for_products_and_stay_what_they_are() -> None:
    plain = whole_model("llama")
    ids = torch.tensor([PROMPTS[0]])
    before = {name: p.clone() for name, p in plain.named_parameters()}
    merge_projections(plain)
    with torch.no_grad():
        expected = plain(ids).logits
        assert lay_inputs_first(plain) == 4 * (2 + 2) + 1
        torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-5, atol=1e-5)
    after = dict(plain.named_parameters())
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["lm_head.weight"].t().is_contiguous()
    attention_module = plain.model.layers[0].self_attn
    merged = attention_module.q_proj.merged.weight
    assert attention_module.k_proj.weight.untyped_storage().data_ptr() == (
        merged.untyped_storage().data_ptr()
    )
    tied = whole_model("llama_tied")
    lay_inputs_first(tied)
    assert tied.lm_head.weight.is_contiguous()


@pytest.mark.parametrize(
    ("outputs", "apart"),
    [(512, 528), (4096, 4112), (768, 784), (784, 784), (1001, 1008), (256, 272), (64, 64)],
)
def test_long_rows_of_a_weight_begin_at_different_places_of_a_page(
    outputs: int, apart: int
) -> None:
    weight = torch.randn(outputs, 24)
    stored = inputs_first(weight)
    assert stored.stride() == (1, apart)
    assert torch.equal(stored, weight)
    linear = torch.nn.Linear(24, outputs, bias=False)
    x = torch.randn(5, 24)
    with torch.inference_mode():
        expected = linear(x)
        assert lay_inputs_first(linear) == 1
        torch.testing.assert_close(linear(x), expected)


def test_fused_and_transposed_projections_are_left_alone() -> None:
    assert merge_projections(whole_model("gpt2")) == []
    merges = merge_projections(whole_model("phi3"))
    assert merges == []


class Crossed(torch.nn.Module):
    """Feeds its projections different tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any, y: Any) -> Any:
        return self.q_proj(x) + self.k_proj(y) + self.v_proj(y)


def test_projections_fed_different_tensors_are_right_and_come_apart_again() -> None:
    module = Crossed()
    x, y = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = module(x, y)
        merges = merge_projections(module)
        torch.testing.assert_close(module(x, y), expected)
        assert isinstance(module.q_proj, MergedLinear)
        assert unmerge_wasted(merges) == 0
        assert type(module.q_proj) is torch.nn.Linear
        torch.testing.assert_close(module(x, y), expected)


# --- captured steps -------------------------------------------------------------------------


def by_reference(kinds: Any, block_size: int | None) -> Choice:
    chosen = [Chosen(kind, kinds.count(kind), "reference", {}) for kind in dict.fromkeys(kinds)]
    return Choice(tuple(chosen), block_size or 16)


def on_device(family: str, block_size: int, **more: Any) -> tuple[Any, StageRunner, Recorder]:
    """A runner that takes the path of a GPU, on CPU tensors, with graphs that are recorded."""
    graphs = Recorder()
    plain, made = runner_of(family, block_size, chooser=by_reference, graphs=graphs, **more)
    return plain, made, graphs


def test_sizes_of_graphs_are_few_and_end_with_all_rows() -> None:
    assert captured_rows(1) == [1]
    assert captured_rows(5) == [1, 2, 4, 5]
    assert captured_rows(40) == [1, 2, 4, 8, 16, 32, 40]
    assert captured_rows(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
    assert captured_rows(5000)[-2:] == [448, 512]


@pytest.mark.usefixtures("reference_operator")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_captured_steps_equal_a_plain_forward_and_touch_no_other_sequence(family: str) -> None:
    """Prompts, mixed and decode steps, some of them without logits, on the path of a GPU: steps of
    one token each are replayed, from the addresses of the capture, with padding that changes."""
    plain, runner, graphs = on_device(family, 4)
    runner.allocate(96)
    assert runner.graphs is not None
    assert runner.graphs.captured == [1, 2, 4]
    assert graphs.order == [4, 2, 1], "the largest first"
    sequences = [[*range(3, 30)], [*range(20, 45)], [9] * 26, [*range(3, 7), *range(40, 60)]]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens])).logits[0] for tokens in sequences]
    worst = 0.0
    for every in (True, False):  # a step whose rows ask for no logits is replayed, too
        scheduler = ToyScheduler(
            sequences, block_size=4, num_blocks=96, chunks=(1, 1, 1, 6), every_logit=every
        )
        worst = max(worst, compare_pages(scheduler, runner.run, expected, {0, 1, 2}))
        scheduler.share(0, 3, 1)  # of the prefix cache
        worst = max(worst, compare_pages(scheduler, runner.run, expected))
    assert runner.graphs.replays > 20
    assert worst < 1e-5 * max(float(e.abs().max()) for e in expected)


@torch.inference_mode()
@pytest.mark.usefixtures("reference_operator")
def test_tokens_that_only_the_device_knows() -> None:
    """A plan made before the tokens of the one before it are known gives the same logits."""
    plain, runner, _ = on_device("llama", 4, lookahead=True)
    runner.allocate(96)
    prompts = [[5, 9, 33, 12, 60], [11, 4, 50]]
    first = StepPlan(
        0,
        [BatchRow(0, 0, 5, LAST, [0, 1]), BatchRow(1, 0, 3, LAST, [2])],
        [*prompts[0], *prompts[1]],
        [a_slot(0), a_slot(1)],
    )
    logits = runner.run(first)
    assert runner.last_tokens is not None
    for number in range(1, 4):
        tokens = logits.argmax(-1)
        runner.last_tokens[:2] = tokens  # as the sampler does, on the device
        for prompt, token in zip(prompts, tokens.tolist(), strict=True):
            prompt.append(token)
        # in one step both are unknown, in one the first is known: a request that was preempted
        known = [prompts[0][-1] if number == 2 else UNKNOWN, UNKNOWN]
        rows = [
            BatchRow(0, 4 + number, 1, LAST, [3] if number == 4 else ()),
            BatchRow(1, 2 + number, 1, LAST, [4] if number == 2 else ()),
        ]
        logits = runner.run(StepPlan(number, rows, known))
        with torch.no_grad():
            wanted = torch.stack([plain(torch.tensor([p])).logits[0, -1] for p in prompts])
        assert float((logits - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    mixed = StepPlan(
        4,
        [BatchRow(0, 8, 1, LAST, [5]), BatchRow(2, 0, 3, LAST, [6])],
        [UNKNOWN, 7, 8, 9],
        [a_slot(2)],
    )
    runner.last_tokens[0] = 17
    logits = runner.run(mixed)
    with torch.no_grad():
        for row, tokens in zip(logits, ([*prompts[0], 17], [7, 8, 9]), strict=True):
            wanted = plain(torch.tensor([tokens])).logits[0, -1]
            assert float((row - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


def a_slot(slot: int) -> Admission:
    return Admission(slot=slot, sampling=SamplingParams(max_new_tokens=9, seed=0), prompt_length=3)


@pytest.mark.usefixtures("reference_operator")
def test_a_step_that_reads_the_device_is_run_eagerly_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, runner, graphs = on_device("llama", 4)
    forward = runner._on_device

    def looks(step: Any, *rest: Any) -> Any:
        assert int(step.tokens.sum()) >= 0
        return forward(step, *rest)

    monkeypatch.setattr(runner, "_on_device", looks)
    runner.allocate(96)
    assert runner.graphs is not None
    assert graphs.failures == 1
    assert runner.graphs_json() == {
        "sizes": [],
        "reason": "a step of this model cannot be captured: aten.item reads the device",
    }
    sequences = [[*range(3, 12)]]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens])).logits[0] for tokens in sequences]
    scheduler = ToyScheduler(sequences, block_size=4, num_blocks=96, every_logit=True)
    scale = max(float(e.abs().max()) for e in expected)
    assert compare_pages(scheduler, runner.run, expected) < 1e-5 * scale
    assert runner.graphs.replays == 0


def test_all_ranks_give_a_size_up_together() -> None:
    """What one rank cannot capture no rank replays: its collectives would wait for ever."""
    _, runner, _ = on_device("llama", 4)
    runner._place(8)
    answers = iter([True, False])
    graphs = DecodeGraphs(
        runner._on_device, runner._device_tables, max_num_seqs=4, hidden=None, unknown=False,
        device=Recorder(), agree=lambda captured: captured and next(answers),
    )  # fmt: skip
    with torch.inference_mode():
        graphs.capture()
    assert graphs.captured == []
    assert graphs.reason == "a step of this model cannot be captured by another rank"


def test_more_new_blocks_than_one_copy_holds_arrive() -> None:
    tables = DeviceTables(2, 4096, 8, block_size=4, spare_block=9000, device=torch.device("cpu"))
    blocks = random.Random(1).sample(range(9000), 3000)
    plan = StepPlan(0, [BatchRow(0, 11996, 1, LAST, blocks), BatchRow(1, 3, 1, LAST, [8])], [5, 6])
    changes = tables.apply(plan)
    made = tables.send(tables.host(plan), changes)
    assert made.tables[0, :3000].tolist() == blocks
    assert made.tables[1, :2].tolist() == [8, 9000]
    assert made.places.tolist() == [blocks[2999] * 4, 8 * 4 + 3]
    assert made.lengths.tolist() == [11997, 4]
    assert made.begins.tolist() == [0, 1, 2]
    assert tables.staging.copies == 1
