"""Attention checks: sequences of any length in training, and the paged Triton kernel in serving.

Training's windows and packed documents go as boundaries through `models.attention` and are compared
with an explicit mask in fp64, forward and backward. On a CPU the boundaries become a dense mask, as
for layers that no flash kernel takes.

Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, CheckOutcome, row_of
from hocket.doctor.numbers import LIMITS, _attention, _compare_backward
from hocket.doctor.place import Place

if TYPE_CHECKING:
    from torch import Tensor

DECODE_SHARE = 0.5
"""Of the memory bandwidth, which a decode step of one long sequence is to reach."""
FLEX_LENGTH = 2048
"""Tokens of the row in the checks of flex attention."""
_CAPTURED = "a CUDA graph is captured by a device alone"


_row = row_of(
    "hocket.doctor.attention", prefix="kernel-", group="kernels", capability=(8, 0), seconds=1.5,
    timeout=90.0,
)  # fmt: skip


CHECKS = (
    *(
        _row(
            f"varlen-{name}", f"training's attention over {what}, forward and backward, compared "
            "with an explicit mask", "compare_windows",
            f"differences of at most {LIMITS['bf16']:g} of the largest entry", arguments=arguments,
            rehearsals=(CPU, FAKE),
        )
        for name, what, arguments in (
            ("window", "rows of one sequence with a sliding window", {"window": True}),
            ("packed", "rows of several documents with a sliding window",
             {"window": True, "packed": True}),
            ("empty", "boundaries that are filled up with documents of no tokens, in grouped heads",
             {"packed": True, "empty": 64}),
        )
    ),
    *(
        _row(
            f"flex-{family.replace('_', '-')}", f"a step of a tiny {family} ({what}), fp32, 2,048 "
            "tokens, compared with transformers' eager code on the CPU; then one under "
            "torch.cuda.set_sync_debug_mode", "compare_flex",
            "the loss within 1e-5, each gradient within "
            "1e-3 of its largest entry; less memory than a matrix of scores for each layer; no "
            "wait of the host (but for experts)", arguments={"family": family},
            seconds=9.0, timeout=180.0, rehearsals=(FAKE,), fake="hocket.doctor.fake:fake_flex",
            slow=True,
        )
        for family, what in (
            ("gemma2", "soft caps, windows, packed documents"), ("gpt_oss", "sinks, windows"),
            ("deepseek_v3", "keys of 24 and values of 16, packed documents"),
        )
    ),
    _row(
        "sdpa-choice", "the attention kernel that torch chooses (torch._fused_sdp_choice) "
        "against the rules of spec/attention_kernel.py, for head sizes 64 to 512, three dtypes, "
        "with and without a mask", "sdpa_choice", "the same kernel in every case", rehearsals=(),
        unrehearsed="torch's choice is made for a real device", seconds=2.0,
    ),
    _row(
        "paged-triton-graph", "Triton paged attention captured in a CUDA graph, replayed with "
        "other lengths and blocks", "paged_graph", "equal to the eager call bit for bit, 4 times",
        packages=("triton",), rehearsals=(), unrehearsed=_CAPTURED, seconds=3.0,
    ),
    _row(
        "paged-triton-decode", "Triton paged attention: one decode step at batch 1 over 65,536 "
        "tokens, 32 query and 8 key/value heads of 128, bf16", "paged_decode",
        f"{DECODE_SHARE:g} of the memory bandwidth or more", packages=("triton",), seconds=3.0,
        rehearsals=(FAKE,),
    ),
)  # fmt: skip


# --- training --------------------------------------------------------------------------------


def compare_windows(
    place: Place, *, window: bool = False, packed: bool = False, empty: int = 0
) -> CheckOutcome:
    """Attention by the boundaries of sequences, and by a mask made from their lengths.

    Args:
        window: a query sees an eighth of a row.
        packed: rows hold several documents.
        empty: documents of no tokens, beyond those that `documents_in` appends.
    """
    import torch

    from hocket.models import attention
    from hocket.models.rows import documents_in

    attention.choose_kernels_on_cuda()
    rows, heads, kv_heads, length, width = place.size((2, 16, 4, 1024, 128), (2, 4, 2, 32, 16))
    kind = torch.float32 if place.form == CPU else torch.bfloat16
    q = place.draw(rows, heads, length, width, dtype=kind, seed=1, grad=True)
    k = place.draw(rows, kv_heads, length, width, dtype=kind, seed=2, grad=True)
    v = place.draw(rows, kv_heads, length, width, dtype=kind, seed=3, grad=True)
    sizes = [length // 4 - 1, 1, length // 2, length - length // 4 - length // 2]
    seen = length // 8 if window else length
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    with _real():  # as the loop's inputs find them, on the host
        cu_seqlens, longest = torch.arange(rows + 1, dtype=torch.int32) * length, length
        if packed:
            positions = torch.cat([torch.arange(size) for size in sizes]).expand(rows, -1)
            known = documents_in(positions.contiguous())
            assert known is not None
            cu_seqlens, longest = known.cu_seqlens, known.longest
        if empty:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(empty)])
    mask = attention.boundaries(
        cu_seqlens.to(place.device), window=seen if window else None, longest=longest,
        length=length,
    )  # fmt: skip
    if place.form == CPU:  # the kernel is CUDA's: the mask that boundaries stand for
        mask = attention.dense_mask(mask, rows, length)
    explicit = torch.zeros(length, length, dtype=torch.bool)
    for begin, end in itertools.pairwise(starts) if packed else [(0, length)]:
        at = torch.arange(end - begin)
        distance = at.unsqueeze(1) - at
        explicit[begin:end, begin:end] = (distance >= 0) & (distance < seen)
    call = attention.sdpa_function()
    module: Any = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    module.is_causal = True
    out, _ = call(module, q, k, v, mask, dropout=0.0, scaling=width**-0.5)
    expected = _attention(q, k, v, explicit.to(place.device), width**-0.5)
    _compare_backward(
        place, out.transpose(1, 2), expected, {"query": q, "key": k, "value": v}, LIMITS["bf16"]
    )
    return place.outcome(sequences=len(cu_seqlens) - 1)


def _real() -> Any:
    """Without fake tensors, where there are any: what the host computes before a step."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def sdpa_choice(place: Place) -> CheckOutcome:
    """torch's kernels and those that the rules expect."""
    import torch

    from hocket.models.attention_layers import kernel_on
    from hocket.spec.attention_kernel import AttentionLayer, attention_kernel

    capability = torch.cuda.get_device_capability(place.device)
    cases = 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for sizes in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512), (30, 30)):
            for masked in (False, True):
                layer = AttentionLayer(key_size=sizes[0], value_size=sizes[1], masked=masked)
                name = str(dtype).removeprefix("torch.")
                expected = attention_kernel(layer, dtype=name, capability=capability).name
                found = kernel_on(layer, dtype=dtype, device=place.device, seq_len=256)
                words = f"heads of {sizes[0]} and {sizes[1]}, {name}{', masked' * masked}"
                place.equal(words, found.name, expected)
                cases += 1
    return place.outcome(cases=cases)


def compare_flex(place: Place, *, family: str) -> CheckOutcome:
    """Loss and gradients of a family whose attention flex attention computes."""
    import torch

    from hocket.doctor.families import FLEXIBLE
    from hocket.models import attention, rows
    from hocket.models.skeleton import build_skeleton

    length = FLEX_LENGTH
    config = {**FLEXIBLE[family], "max_position_embeddings": length}
    packed = family != "gpt_oss"  # its documents see each other: packing is rejected
    sizes = [length // 4, length // 2 - 3, 3, length // 4] if packed else [length]
    positions = torch.cat([torch.arange(size) for size in sizes])[None].contiguous()
    ids = torch.randint(0, 64, positions.shape, generator=torch.Generator().manual_seed(3))
    torch.set_float32_matmul_precision("highest")

    def model_of(implementation: str) -> Any:
        made: Any = build_skeleton(
            dict(config), device="cpu", dropout=0.0, attention=implementation
        )
        for name, parameter in made.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn * (1.0 if "sinks" in name or parameter.ndim == 1 else 0.3))
        return made

    def step(model: Any, at: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = model(input_ids=tokens, position_ids=at, use_cache=False).logits.square().mean()
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), found

    expected, wanted = step(model_of("eager"), positions, ids)
    model = model_of("sdpa")
    attention.choose_kernels_on_cuda(model)
    model.to(place.device)
    documents = rows.documents_in(positions) if packed else None
    if documents is not None:
        begins = documents.cu_seqlens.to(place.device)
        documents = rows.Documents(begins, documents.longest)
    there, tokens = positions.to(place.device), ids.to(place.device)
    rows.note_documents(there, documents)
    with rows.packed_rows() if packed else rows.one_sequence_each():
        step(model, there, tokens)  # compiles the kernel
        place.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            # Experts in fp32 are computed in a loop, whose bounds the host reads.
            with place.no_waits() if packed else contextlib.nullcontext():
                loss, found = step(model, there, tokens)
        except RuntimeError as error:
            place.failures.append(f"the step waits for the device: {str(error).splitlines()[0]}")
            loss, found = step(model, there, tokens)
        place.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    place.compare("loss", loss.reshape(1), expected.reshape(1), 1e-5)
    place.equal("names of gradients", sorted(found), sorted(wanted))
    for name in sorted(set(found) & set(wanted)):
        place.compare(f"gradient_{name}", found[name], wanted[name], 1e-3)
    place.at_most("step_bytes", taken, scores_bytes(config, length))
    return place.outcome()


def scores_bytes(config: dict[str, Any], length: int) -> int:
    """Bytes of one matrix of scores of `length` x `length` for each layer, fp32."""
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    return 4 * layers * heads * length**2


# --- serving ---------------------------------------------------------------------------------


def paged_graph(place: Place) -> CheckOutcome:
    """A captured call, replayed after its inputs were overwritten."""
    import dataclasses

    import torch

    from hocket.runtime.triton.paged_attention import paged_attention
    from hocket.runtime.triton.paged_attention_cases import PagedBatch

    base = PagedBatch(
        name="graph", counts=(1,) * 4, lengths=(500, 40, 3, 90), heads=(8, 2), sizes=(128, 128),
        dtype=torch.bfloat16, max_blocks=64,
    )  # fmt: skip
    cases = [
        dataclasses.replace(base, lengths=lengths, seed=seed)
        for seed, lengths in enumerate(
            ((500, 40, 3, 90), (501, 41, 4, 91), (7, 900, 0, 33), (1, 1, 1, 1))
        )
    ]
    blocks = max(case.arguments()["key_cache"].shape[0] for case in cases)
    batches: list[dict[str, Any]] = []
    for case in cases:
        given = case.arguments(place.device)
        for name in ("key_cache", "value_cache"):  # one size for all
            cache = given[name]
            given[name] = cache.new_zeros(blocks, *cache.shape[1:])
            given[name][: len(cache)] = cache.nan_to_num(0.0)
        batches.append(given)
    static = {n: v.clone() if hasattr(v, "clone") else v for n, v in batches[0].items()}
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # compile before the capture
        for _ in range(2):
            paged_attention(**static)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**static)
    for number, given in enumerate(batches):
        for name, value in given.items():
            if hasattr(value, "copy_"):
                static[name].copy_(value)
        graph.replay()
        eager = paged_attention(**given)
        place.equal(f"replay {number} equals the eager call", torch.equal(out, eager), True)
    return place.outcome(replays=len(batches))


def paged_decode(place: Place) -> CheckOutcome:
    """Seconds of a decode step, in which every key and value is read once."""
    import torch

    from hocket.runtime.triton.paged_attention import paged_attention

    context, block = place.size((65536, 16), (256, 16))
    heads, kv_heads, width, blocks = 32, 8, 128, context // block
    kind = torch.bfloat16
    query = place.draw(1, heads, width, dtype=kind, seed=1)
    keys, values = (
        torch.zeros(blocks, block, kv_heads, width, dtype=kind, device=place.device) + 0.5
        for _ in range(2)
    )
    tables = torch.arange(blocks, dtype=torch.int32, device=place.device).view(1, -1)
    lengths = torch.full((1,), context, dtype=torch.int32, device=place.device)
    begins = torch.arange(2, dtype=torch.int32, device=place.device)

    def step() -> Tensor:
        return paged_attention(query, keys, values, tables, lengths, begins, 1, scale=width**-0.5)

    place.compare("output", step(), torch.full_like(query, 0.5), LIMITS["bf16"])
    seconds = place.kernel_seconds(step)
    read = 2 * context * kv_heads * width * 2
    place.at_least("share_of_bandwidth", read / seconds / place.peak_bandwidth(), DECODE_SHARE)
    return place.outcome()
