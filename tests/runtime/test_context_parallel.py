"""Ring attention and Ulysses: outputs and gradients of shards equal those of whole sequences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.context_parallel import blocks  # noqa: E402
from hocket.runtime.context_parallel.ulysses import heads_divide  # noqa: E402
from hocket.runtime.context_parallel.zigzag import piece, positions  # noqa: E402

CASES = {
    "plain": {},
    "one key head": {"heads": (4, 1)},
    "equal heads": {"heads": (4, 4)},
    "sizes": {"sizes": (24, 8)},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "sinks": {"with_sinks": True},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "documents": {"documents": True},
    "all": {"softcap": 3.0, "with_sinks": True, "window": 7, "documents": True, "sizes": (8, 24)},
}


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("name", CASES)
def test_shards_compute_what_whole_sequences_do(ranks, method: str, name: str) -> None:
    for row in ranks.run("tests.runtime.context_cases:attention", 2, method=method, **CASES[name]):
        row.pop("bytes")
        assert max(row.values()) < 1e-12, row


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_on_four_ranks_and_the_shared_memory_backend(ranks, method: str, name: str) -> None:
    found = ranks.run(
        "tests.runtime.context_cases:attention", 4, method=method, backend="shm", **CASES[name]
    )
    for row in found:
        row.pop("bytes")
        assert max(row.values()) < 1e-12, row


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 3e-6), ("bfloat16", 0.06)])
def test_in_single_and_half_precision(ranks, method: str, dtype: str, bound: float) -> None:
    for name in ("plain", "sinks", "window"):
        for row in ranks.run(
            "tests.runtime.context_cases:attention", 2, method=method, dtype=dtype, **CASES[name]
        ):
            row.pop("bytes")
            assert max(row.values()) < bound, (name, row)


@pytest.mark.ranks
def test_a_ring_sends_keys_and_values_once_around(ranks) -> None:
    """[2, 2, 32 / n, 16] keys and as many values, of 8 bytes: n - 1 times in each pass, and their
    gradients n times."""
    for size in (2, 4):
        found = ranks.run("tests.runtime.context_cases:attention", size, method="ring")
        both = 2 * (2 * 2 * (32 // size) * 16) * 8
        assert {row["bytes"] for row in found} == {float(both * (2 * (size - 1) + size))}
        # q and out of 4 heads, k and v of 2 (sent as 4 on four ranks), forward and backward
        sent = 2 * (32 // size) * 16 * 8 * 2
        heads = 4 + 4 + 2 * max(2, size)
        found = ranks.run("tests.runtime.context_cases:attention", size, method="ulysses")
        assert {row["bytes"] for row in found} == {float(sent * heads)}


@pytest.mark.parametrize("ranks_", [2, 3, 4])
def test_pieces_of_all_steps_are_the_causal_mask(ranks_: int) -> None:
    length = 2 * ranks_ * 3
    place = torch.arange(length)
    seen = torch.zeros(length, length, dtype=torch.long)
    work = []
    for index in range(ranks_):
        mine = positions(length, index, ranks_)
        for source in range(ranks_):
            theirs, part = positions(length, source, ranks_), piece(index, source, len(mine))
            queries, keys = mine[part.queries], theirs[part.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.long)
            pairs = pairs.tril() if part.causal else pairs
            seen[queries[:, None], keys] += pairs
            if index != source:
                work.append(pairs.numel())
    assert torch.equal(seen, (place <= place[:, None]).long())
    assert len(set(work)) == 1  # every rank multiplies as much in every step


def test_rows_without_a_key_add_nothing() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    scores = blocks.Scores(scale=0.5)
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 1:, :2] = True
    out, lse = blocks.forward(query, key, value, scores, mask)
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 8, dtype=torch.float64))
    assert torch.isneginf(lse[:, :, 0]).all()
    other, other_lse = blocks.forward(query, key, value, scores, True)
    both, _ = blocks.merge(out, lse, other, other_lse)
    torch.testing.assert_close(both[:, :, 0], other[:, :, 0])
    empty, _ = blocks.merge(out, lse, out, lse)
    assert not torch.isnan(empty).any()
    grads = blocks.backward(torch.ones_like(out), query, key, value, out, lse, scores, mask)
    assert not any(torch.isnan(each).any() for each in grads)


def test_which_heads_ulysses_takes() -> None:
    assert heads_divide(32, 8, 4)
    assert heads_divide(32, 8, 16)
    assert not heads_divide(12, 12, 8)
    assert not heads_divide(12, 3, 4)
