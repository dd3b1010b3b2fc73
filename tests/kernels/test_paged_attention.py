"""Paged attention in Triton: against plain PyTorch, by Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.triton import paged_attention as module  # noqa: E402
from hocket.runtime.triton.paged_attention import (  # noqa: E402
    AttentionTile,
    launch_of,
    num_splits,
    paged_attention,
)
from hocket.runtime.triton.paged_attention_cases import (  # noqa: E402
    CASES,
    TOLERANCE,
    PagedBatch,
    largest_error,
    paged_attention_reference,
)
from tests.kernels import interpreter  # noqa: E402
from tests.rotation import part  # noqa: E402

pytestmark = pytest.mark.torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
DTYPES = {str(dtype): dtype for dtype in TOLERANCE}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, ...)`: the function's result in a process that interprets kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=interpreter.begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@needs_triton
@pytest.mark.parametrize("name", part([case.name for case in CASES], 3))
def test_equals_plain_pytorch(interpreted: Callable[..., Any], name: str) -> None:
    error, dtype = interpreted(interpreter.error_of_case, name)
    assert error < TOLERANCE[DTYPES[dtype]]


def test_cases_have_names_of_their_own_and_cover_both_launches() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 50
    launches = [_launch(case) for case in CASES]
    assert {launch.splits > 1 for launch in launches} == {True, False}
    assert {launch.constants["ONE_TILE"] for launch in launches} == {True, False}
    assert {launch.tile.rows for launch in launches} >= {16, 32, 128}


def _launch(case: PagedBatch) -> module.Launch:
    longest = max(*case.lengths, 1)
    return launch_of(
        dtype=case.dtype, num_tokens=max(sum(case.counts), 1), num_rows=len(case.counts),
        num_heads=case.heads[0], num_kv_heads=case.heads[1], key_size=case.sizes[0],
        value_size=case.sizes[1], block_size=case.block_size,
        max_blocks=max(case.max_blocks, -(-longest // case.block_size)),
        max_seqlen_q=max(1, *case.counts), causal=case.causal, window=case.window is not None,
        softcap=case.softcap is not None, sinks=case.sinks, multiprocessors=132,
    )  # fmt: skip


@needs_triton
def test_a_token_too_few_is_seen(interpreted: Callable[..., Any]) -> None:
    assert interpreted(interpreter.error_when_keys_are_shifted, "decode") > 0.01


@needs_triton
def test_a_query_may_be_a_view(interpreted: Callable[..., Any]) -> None:
    assert interpreted(interpreter.same_in_any_layout, "mixed")


def test_the_reference_is_attention_of_whole_sequences() -> None:
    """Of one sequence without a cache before it, and causal: PyTorch's own."""
    case = PagedBatch(name="whole", counts=(20,), lengths=(20,), heads=(4, 4), seed=1)
    arguments = case.arguments()
    keys, values = (
        cache[arguments["block_tables"][0].long()].flatten(0, 1)[:20].transpose(0, 1)
        for cache in (arguments["key_cache"], arguments["value_cache"])
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        arguments["query"].transpose(0, 1), keys, values, is_causal=True
    )
    found = paged_attention_reference(**arguments)
    assert torch.allclose(found.float().transpose(0, 1), wanted, atol=1e-5)


def test_traced_on_fake_tensors() -> None:
    """Shape, dtype and device without a kernel or a device: what rehearsal and graphs rely on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = PagedBatch(name="fake", counts=(3, 1), lengths=(9, 4), sizes=(192, 128)).arguments()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = {
            key: torch.empty(value.shape, dtype=value.dtype, device="cuda:0")
            if isinstance(value, torch.Tensor)
            else value
            for key, value in arguments.items()
        }
        out = paged_attention(**fake)
    assert (tuple(out.shape), out.dtype, out.device.type) == ((4, 4, 128), torch.float32, "cuda")


def test_split_keys_fill_the_device() -> None:
    tile = AttentionTile(16, 64, 4, 3)
    assert num_splits(8, 1 << 17, tile, 132) == 33  # one sequence, 8 heads: 264 programs
    assert num_splits(132, 1 << 17, tile, 132) == 1  # full already
    assert num_splits(8, 256, tile, 132) == 2  # nothing shorter than two iterations
    assert num_splits(1, 1 << 17, tile, 132) == 64


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_every_row_of_every_sequence_has_a_tile(rows: int, group: int) -> None:
    """The arithmetic of `_sequence_of`: no lengths on the host, and enough tiles for all."""
    generator = torch.Generator().manual_seed(rows * group)
    for _ in range(20):
        counts = torch.randint(0, 200, (rows,), generator=generator).tolist()
        tile = 32
        begins = [sum(counts[:i]) for i in range(rows + 1)]
        grid = begins[-1] * group // tile + rows
        first = [begins[r] * group // tile + r for r in range(rows)] + [grid]
        for r in range(rows):
            assert (first[r + 1] - first[r]) * tile >= counts[r] * group


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key_cache=lambda t: t[:, :, :, :32]), "does not fit"),
        (dict(query=lambda t: t.double()), "float64"),
        (dict(query=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)), "dense"),
        (dict(query=lambda t: t[:, :3]), "does not fit"),
        (dict(value_cache=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)), "contiguous"),
        (dict(block_tables=lambda t: t.long()), "int64"),
        (dict(block_tables=lambda t: t.repeat(2, 1)), "seqused_k"),
        (dict(seqused_k=lambda t: t.repeat(2)[::2]), "contiguous"),
        (dict(cu_seqlens_q=lambda t: t[:-1]), "cu_seqlens_q"),
        (dict(window=lambda t: 0), "window"),
        (dict(sinks=lambda t: torch.zeros(3)), "sinks"),
        (dict(query=lambda t: t[0]), "dimensions"),
    ],
)
def test_what_it_cannot_do_is_rejected(
    change: dict[str, Callable[[Any], Any]], message: str
) -> None:
    arguments = PagedBatch(name="bad", counts=(3, 1), lengths=(9, 4)).arguments()
    for key, to in change.items():
        arguments[key] = to(arguments[key])
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


def test_large_heads_and_odd_blocks_are_rejected() -> None:
    for bad in (
        PagedBatch(name="head", counts=(1,), lengths=(3,), sizes=(512, 512)),
        PagedBatch(name="block", counts=(1,), lengths=(3,), block_size=24),
    ):
        with pytest.raises(ValueError, match=r"512|24"):
            paged_attention(**bad.arguments())


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_equals_plain_pytorch_on_a_gpu(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    if case.cached is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    assert largest_error(case, "cuda") < TOLERANCE[case.dtype]


@pytest.mark.gpu
def test_replays_in_a_graph_with_other_lengths() -> None:
    """Captured once with the grid of its shapes, right for whatever lengths are written later."""
    case = PagedBatch(name="graph", counts=(1,) * 4, lengths=(90, 1, 33, 64), dtype=torch.bfloat16)
    arguments = case.arguments("cuda")
    paged_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**arguments)
    for lengths in ((90, 1, 33, 64), (17, 1, 2, 50), (5, 0, 33, 1)):
        arguments["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        wanted = paged_attention_reference(**arguments)
        assert (out.double() - wanted).abs().max() < 0.03
