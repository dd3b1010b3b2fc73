"""Prices of one serving replica: bytes by hand, seconds against what cannot be beaten."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import numpy as np
import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.cost.serving import ServingPrices, products_in, serving_prices
from hocket.cost.serving_constants import (
    ENGINE_FIELDS,
    GPU_FIELDS,
    engine_chain,
    engines,
    gpu_entry,
    serving_constants,
)
from hocket.cost.serving_rank import cached_elements, rank_core, rank_matmuls, touched_share
from hocket.cost.serving_shape import cached_shape, latent_width, served_shape
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.model_shape import Attention, BlockShape, MatrixProduct


def prices(model: str, on: str, **options: object) -> ServingPrices:
    return serving_prices(shape(model), cluster(on), **options)  # type: ignore[arg-type]


def test_weights_and_cache_by_hand() -> None:
    one = prices("llama-3-8b", "1xH100-SXM-80")
    assert one.weight_bytes == 2 * 8_030_261_248
    assert one.cache_bytes == 32 * 8 * (128 + 128) * 2
    eight = prices("llama-3-70b", "8xH100-SXM-80", tp=8)
    assert eight.cache_bytes == 80 * 256 * 2
    small = prices("llama-3-70b", "8xH100-SXM-80", tp=8, cache_precision="fp8")
    assert small.cache_bytes == eight.cache_bytes / 2
    assert eight.weight_bytes == pytest.approx(2 * 70_553_706_496 / 8, rel=0.001)


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    """gpt-oss: 18 of 36 layers see 128 tokens. Of a request of 1,024 they hold an eighth."""
    token = 36 * 8 * (64 + 64) * 2
    assert (
        prices("gpt-oss-120b", "1xH100-SXM-80", precision="fp4").shape.layers.count(
            "sliding_attention"
        )
        == 18
    )
    for tokens, held in ((float("inf"), 1.0), (128, 1.0), (1024, (1 + 1 / 8) / 2)):
        one = prices("gpt-oss-120b", "1xH100-SXM-80", cache_precision="bf16", request_tokens=tokens)
        assert one.cache_bytes == pytest.approx(held * token)
    assert prices("llama-3-8b", "1xH100-SXM-80", request_tokens=9).cache_bytes == 32 * 8 * 256 * 2


def test_a_layer_of_more_kernels_takes_longer_to_start() -> None:
    """Norms of queries and keys, latent attention and quantized inputs are kernels: of a
    device that moves and multiplies without time they are what is left."""
    seconds = {}
    for model in ("llama-3-8b", "qwen3-32b", "deepseek-v3"):
        for precision in ("bf16", "fp8"):
            one = prices(model, "1xH200", precision=precision)
            machine = one.replica.platform.machine
            endless = dataclasses.replace(
                machine, bandwidth=machine.bandwidth * 1e9, flops=machine.flops * 1e9
            )
            replica = dataclasses.replace(
                one.replica,
                flops=one.replica.flops * 1e9,
                platform=dataclasses.replace(one.replica.platform, machine=endless),
                constants=dataclasses.replace(
                    one.replica.constants, step_time=0.0, sequence_time=0.0, expert_time=0.0
                ),
            )
            free = dataclasses.replace(one, replica=replica)
            layers = len(one.shape.layers)
            each = float(free.decode_seconds(1, 1)[0]) / layers
            seconds[model, precision] = each / one.replica.constants.kernel_time
    assert seconds["llama-3-8b", "bf16"] == pytest.approx(10, rel=1e-3)
    assert seconds["llama-3-8b", "fp8"] == pytest.approx(14, rel=1e-3)
    assert seconds["qwen3-32b", "bf16"] == pytest.approx(12, rel=1e-3)
    assert seconds["deepseek-v3", "fp8"] > 1.5 * seconds["llama-3-8b", "fp8"]


def test_few_heads_are_held_by_several_ranks() -> None:
    """Qwen3 235B has four key/value heads: eight ranks hold one each, twice."""
    four = prices("qwen3-235b-a22b", "8xH200", tp=4, precision="fp8")
    eight = prices("qwen3-235b-a22b", "8xH200", tp=8, precision="fp8")
    assert four.cache_bytes == eight.cache_bytes


def _attending(
    heads: int, kv_heads: int, columns: tuple[int, ...], split: str, name: str = "attn",
    out: str = "attn.out",
) -> BlockShape:  # fmt: skip
    """A layer of heads of 16 whose products read 64 elements, `out` what it attended to."""
    names = (*(f"{name}.{i}" for i in range(len(columns))), out, "mlp.up")
    sizes = (*((n, 64) for n in columns), (64, heads * 16), (64, 64))
    core = Attention(
        name=name, heads=heads, kv_heads=kv_heads, head_dim=16, value_dim=16, causal=True,
        window=None, split=split, masked=False,
    )  # fmt: skip
    products = [
        MatrixProduct(name=name, n=n, k=k, split=split, count=1.0, groups=1)
        for name, (n, k) in zip(names, sizes, strict=True)
    ]
    return BlockShape(kind="layer", products=tuple(products), attention=(core,))


@pytest.mark.parametrize(
    ("traced", "columns", "cached"),
    [
        (2, (64, 32, 32), 2),
        (4, (64, 32, 32), 2),  # repeated before they attend
        (2, (128, 32, 32), 2),  # queries with a gate (Qwen3-Next)
        (4, (64, 64, 64, 64), 4),  # a gate of its own (AFMoE)
    ],
)
def test_cached_heads_are_those_of_keys(traced: int, columns: tuple[int, ...], cached: int) -> None:
    block = _attending(4, traced, columns, "outside")
    llama = shape("llama-3-8b")
    whole = dataclasses.replace(llama, blocks={**llama.blocks, "layer": block})
    assert served_shape(whole).blocks["layer"].attention[0].kv_heads == cached
    # Of a shape with a plan, a layer that no plan splits is whole on every rank.
    (core,) = cached_shape(whole).blocks["layer"].attention
    assert (core.split, core.kv_heads) == ("outside", cached)


def test_heads_are_found_where_keys_and_output_are_of_another_module() -> None:
    """BERT's value was taken for the product that ends attention; layers without keys cache those
    of an earlier layer (Gemma 3n), not as many as they have queries."""
    llama = shape("llama-3-8b")
    bert = _attending(4, 4, (64, 64, 64), "outside", "attention.self", "attention.output.dense")
    served = served_shape(dataclasses.replace(llama, blocks={**llama.blocks, "layer": bert}))
    assert served.blocks["layer"].attention[0].kv_heads == 4
    splits = [p.split for p in served.blocks["layer"].products]
    assert splits[3] == "row"
    assert "row" not in splits[:3]
    for traced in (2, 4):  # repeated before they attend, or not
        blocks = {
            "own": _attending(4, traced, (64, 32, 32), "outside"),
            "layer": _attending(4, 4, (64,), "outside"),
        }
        whole = dataclasses.replace(llama, blocks={**llama.blocks, **blocks})
        assert served_shape(whole).blocks["layer"].attention[0].kv_heads == 2


def test_a_latent_vector_is_whole_on_every_rank() -> None:
    """DeepSeek-V3 caches 512 + 64 elements a layer and token, whatever tp is."""
    for tp in (1, 8):
        held = prices("deepseek-v3", "8xH200", tp=tp, precision="fp8", cache_precision="bf16")
        assert held.cache_bytes == 61 * 576 * 2
    model = served_shape(shape("deepseek-v3"))
    for kind in set(model.layers):
        block = model.blocks[kind]
        assert latent_width(block.attention[0], block) == 576


def test_context_ranks_divide_the_cache_and_the_prompt() -> None:
    one = prices("llama-3-8b", "8xH100-SXM-80", tp=2)
    four = prices("llama-3-8b", "8xH100-SXM-80", tp=2, cp=4)
    assert (four.gpus, four.cache_bytes) == (8, one.cache_bytes / 4)
    assert four.weight_bytes == one.weight_bytes
    prompt, row = ((65536.0, 65536.0, 0.0, 1.0), (0.0, 1.0, 1.0, 65536.0))
    assert four.step_seconds(*prompt) < one.step_seconds(*prompt) / 2
    # Of one row that decodes all but attention is computed everywhere.
    assert one.step_seconds(*row) / 2 < four.step_seconds(*row)


@pytest.mark.parametrize(
    ("model", "heads", "keys"),
    [("falcon-180b", 232, 8), ("gpt-oss-120b", 64, 8), ("llama-3-8b", 32, 8), ("gpt2", 12, 12)],
)
def test_engines_divide_every_head(model: str, heads: int, keys: int) -> None:
    whole = served_shape(shape(model))
    core = whole.blocks[whole.layers[0]].attention[0]
    assert (core.heads, core.kv_heads, core.split) == (heads, keys, "inside")
    splits = [p.split for p in whole.blocks[whole.layers[0]].products if p.n > 1024]
    assert "outside" not in splits


def test_decoding_is_no_faster_than_memory() -> None:
    """One token reads all weights once; published servers reach half to four fifths of that."""
    for model, on, bandwidth in (
        ("llama-3-8b", "1xH100-SXM-80", 3.35e12),
        ("llama-2-7b", "1xA100-SXM-80", 2.039e12),
    ):
        one = prices(model, on)
        floor = one.weight_bytes / bandwidth
        assert floor < float(one.decode_seconds(1, 100)[0]) < 2.2 * floor


def test_prompts_are_no_faster_than_the_dense_rate() -> None:
    one = prices("llama-3-8b", "1xH100-SXM-80")
    flops = 2 * 8.03e9 * 8192
    seconds = float(one.prefill_seconds(8192)[0])
    assert flops / 989e12 < seconds < 3 * flops / 989e12


def test_steps_grow_with_what_they_do() -> None:
    one = prices("llama-3-70b", "8xH100-SXM-80", tp=4, precision="fp8")
    batches = np.array([1.0, 8, 64, 256, 1024])
    assert np.all(np.diff(one.decode_seconds(batches, 1000)) > 0)
    assert np.all(np.diff(one.decode_seconds(64, np.array([100.0, 1000, 10000]))) > 0)
    mixed = one.step_seconds(np.array([0.0, 512, 4096]), 1000, 64, 1000)
    assert np.all(np.diff(mixed) > 0)
    # Beside decoding a prompt costs less than alone: the weights are read once.
    alone = one.step_seconds(512, 256, 0, 0)
    assert float(mixed[1]) < float((alone + one.decode_seconds(64, 1000))[0])


def test_experts_that_no_token_reaches_are_not_read() -> None:
    few = prices("mixtral-8x7b", "8xH100-SXM-80", tp=2)
    one, many = few.decode_seconds(np.array([1.0, 64.0]), 100)
    rate = serving_constants("H100-SXM-80", "trtllm").weight_rate
    dense = few.weight_bytes / (3.35e12 * rate)  # every expert, at the rate that weights stream
    assert one < 0.6 * dense
    assert many > dense


def test_links_decide() -> None:
    """Sums of eight GPUs: over PCIe they cost more than four GPUs save, over NVLink they do not."""
    seconds = {
        (gpu, tp): float(
            prices("llama-3-70b", f"8x{gpu}", tp=tp, engine="trtllm-engines").step_seconds(
                1000, 500, 256, 1000
            )[0]
        )
        for gpu in ("A100-SXM-80", "A100-PCIe-80")
        for tp in (4, 8)
    }
    assert seconds["A100-SXM-80", 4] > 1.4 * seconds["A100-SXM-80", 8]
    assert seconds["A100-PCIe-80", 4] < 1.2 * seconds["A100-PCIe-80", 8]


def test_stages_share_the_layers() -> None:
    whole = prices("llama-3-70b", "8xH100-SXM-80", tp=2)
    four = prices("llama-3-70b", "8xH100-SXM-80", tp=2, pp=4)
    assert four.gpus == 8
    assert four.weight_bytes < 0.3 * whole.weight_bytes
    assert four.cache_bytes == whole.cache_bytes / 4
    step, stage = (float(f(0, 0, 32, 1000)[0]) for f in (four.step_seconds, four.stage_seconds))
    assert float(whole.decode_seconds(32, 1000)[0]) < step
    assert step / 4 < stage < step / 2


def test_a_window_bounds_what_is_read() -> None:
    near = prices("gpt-oss-120b", "8xH100-SXM-80", tp=4)
    blocks = {
        name: dataclasses.replace(
            block, attention=tuple(dataclasses.replace(a, window=None) for a in block.attention)
        )
        for name, block in shape("gpt-oss-120b").blocks.items()
    }
    far = serving_prices(
        dataclasses.replace(shape("gpt-oss-120b"), blocks=blocks), cluster("8xH100"), tp=4
    )
    long = [float(p.decode_seconds(64, 16384)[0]) for p in (near, far)]
    short = [float(p.decode_seconds(64, 100)[0]) for p in (near, far)]
    assert long[0] < long[1]
    assert short[0] == short[1]


def test_capacity_is_what_weights_leave() -> None:
    held = prices("llama-3-70b", "8xH100-SXM-80", tp=2)
    tokens = held.capacity(0.9)
    used = held.weight_bytes + held.overhead_bytes + tokens * held.cache_bytes
    assert used == pytest.approx(0.9 * held.memory)
    assert prices("llama-3-70b", "8xH100-SXM-80").capacity(0.9) < 0
    assert dataclasses.replace(held, memory=141e9).capacity(0.9) > 3 * tokens


def test_integers_are_widened_and_a100_has_no_eight_bits() -> None:
    assert products_in("fp8", ("bf16", "fp16")) == "bf16"
    assert products_in("fp8", ("bf16", "fp8")) == "fp8"
    assert products_in("int4", ("bf16", "fp8")) == "bf16"
    assert products_in("fp4", ("bf16", "fp8")) == "fp8"


def test_every_engine_and_gpu_has_all_constants() -> None:
    for engine in engines():
        for gpu in ("A100-SXM-80", "A100-PCIe-80", "H100-SXM-80", "H200-SXM-141", "L40S-48"):
            found = serving_constants(gpu, engine)
            assert all(np.isfinite(value) for value in dataclasses.asdict(found).values())
    assert gpu_entry("A100-PCIe-80") == "A100-PCIe"
    assert gpu_entry("A100-SXM-40") == "A100"
    assert engine_chain("vllm") == ["vllm", "trtllm"]


def test_no_more_than_six_constants_are_fitted() -> None:
    text = (resources.files("hocket.cost") / "data" / "serving.json").read_text()
    data = json.loads(text)
    (fitted,) = (v for k, v in data["how"].items() if k.startswith("by benchmarks/fit/serving.py"))
    assert len(GPU_FIELDS) == 6
    for gpu in data["gpus"].values():
        assert set(gpu) == set(GPU_FIELDS)
    for engine in data["engines"]:
        own = [name for name in fitted if name.startswith(f"engines.{engine}.")]
        assert len(own) <= 6
        assert all(name.rpartition(".")[2] in ENGINE_FIELDS for name in own)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown engine 'vlm'"):
        prices("llama-3-8b", "1xH100", engine="vlm")
    with pytest.raises(OptionError, match="unknown precision 'fp9'"):
        prices("llama-3-8b", "1xH100", precision="fp9")
    with pytest.raises(OptionError, match="unknown cache precision"):
        prices("llama-3-8b", "1xH100", cache_precision="fp12")


@pytest.mark.parametrize("model", ["llama-3-70b", "gpt-oss-20b", "deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (4, 1, 1), (2, 4, 4), (1, 2, 2)])
def test_a_layout_has_the_sizes_of_its_columns(model: str, degrees: tuple[int, int, int]) -> None:
    """Servers on probed machines ask with a layout, those on catalogue GPUs with columns."""
    tp, dp, ep = degrees
    layout = Layout(tp=tp, dp=dp, ep=ep)
    columns = prices(model, "4x8xH200", tp=tp, ep=ep, attention_dp=dp).replica
    served = served_shape(shape(model))
    for block in (served.blocks[kind] for kind in dict.fromkeys((*served.layers, "head"))):
        for one, other in zip(
            rank_matmuls(block, layout, 24.0), rank_matmuls(block, columns, np.array([24.0])),
            strict=True,
        ):  # fmt: skip
            assert one.split == other.split
            for name in ("rows", "n", "k", "experts"):
                assert getattr(one, name) == pytest.approx(np.ravel(getattr(other, name))[0])
        assert cached_elements(block, layout) == cached_elements(block, columns)
        for core in block.attention:
            assert rank_core(core, block, layout) == rank_core(core, block, columns)


def test_experts_that_tokens_reach_are_counted_as_they_are_chosen() -> None:
    """Of 8 tokens with 4 of 32 experts each no 32: routers of random weights reached 20.5 (mean of
    128 layers of Mixtral with such experts); trained ones choose less evenly."""
    assert 32 * touched_share(4 / 32, 1) == 4
    assert 16 < 32 * touched_share(4 / 32, 8) < 20.5
    assert touched_share(4 / 32, 1000) == pytest.approx(1, abs=0.01)
    block = served_shape(shape("gpt-oss-20b")).blocks["full_attention"]
    grouped = [one for one in rank_matmuls(block, Layout(), 8.0) if one.grouped]
    assert [float(one.experts) for one in grouped] == [32 * touched_share(4 / 32, 8)] * 2
    # Of tensor ranks with whole experts each brings half of the tokens.
    halves = rank_matmuls(block, Layout(tp=2, etp=1), 8.0)
    assert [one.rows for one in halves if one.grouped] == [16.0, 16.0]
