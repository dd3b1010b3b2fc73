"""Microbatches: labels are the next tokens; what lies past the held-out text is ignored."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hocket.training.dataset import Batch, BatchOrder, TokenDataset  # noqa: E402
from hocket.training.inputs import IGNORED, Inputs  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def dataset(tmp_path, samples: int, seed: int | None = 0) -> TokenDataset:
    np.arange(8 * samples + 1, dtype=np.uint16).tofile(tmp_path / "t.bin")
    return TokenDataset(tmp_path / "t.bin", "uint16", 8, seed)


def test_labels_are_the_next_tokens(tmp_path) -> None:
    inputs = Inputs(dataset(tmp_path, 20), BatchOrder(12, 2, 3), 1, CPU)
    microbatches = inputs.step(4)
    assert len(microbatches) == 3
    for m in microbatches:
        assert {k: tuple(v.shape) for k, v in m.items()} == dict.fromkeys(
            ("input_ids", "position_ids", "labels"), (2, 8)
        )
        assert {v.dtype for v in m.values()} == {torch.int64}
        assert torch.equal(m["labels"], m["input_ids"] + 1)
        assert torch.equal(m["position_ids"], torch.arange(8).expand(2, 8))


def test_data_ranks_together_are_the_global_batch(tmp_path) -> None:
    data = dataset(tmp_path, 20)
    whole = Inputs(data, BatchOrder(12), 0, CPU).step(1)[0]
    split = [Inputs(data, BatchOrder(12, 2, 3), rank, CPU).step(1) for rank in range(2)]
    for key in ("input_ids", "labels"):
        joined = torch.cat([m[key] for rank in split for m in rank])
        assert torch.equal(joined, whole[key])


def test_held_out_text_is_seen_once(tmp_path) -> None:
    data = dataset(tmp_path, 5, None)
    inputs = [Inputs(data, BatchOrder(4, 2, 1), rank, CPU) for rank in range(2)]
    rows = [m for batch in range(2) for one in inputs for m in one.held_out(batch)]
    ids = torch.cat([m["input_ids"] for m in rows])
    labels = torch.cat([m["labels"] for m in rows])
    assert torch.equal(ids[:5].reshape(-1), torch.arange(40))
    assert torch.equal(labels[:5], ids[:5] + 1)
    assert (labels[5:] == IGNORED).all()
    assert (ids >= 0).all()


def test_on_cuda_the_documents_of_packed_rows_are_known_without_a_look(tmp_path) -> None:
    """Positions that begin again are found on the host, for each microbatch."""
    from hocket.models import rows

    class Packed(TokenDataset):
        def batch(self, indices):
            found = super().batch(indices)
            positions = np.stack([np.arange(8) % (3 + i) for i in range(len(found.ids))])
            return Batch(found.ids, found.labels, positions)

    np.arange(161, dtype=np.uint16).tofile(tmp_path / "t.bin")
    data = Packed(tmp_path / "t.bin", "uint16", 8, 0)
    inputs = Inputs(data, BatchOrder(4, 1, 2), 0, CPU)
    assert all(m["position_ids"] not in rows._KNOWN for m in inputs.step(0))
    inputs.device = torch.device("cuda")
    inputs._brought = lambda found: found.contiguous()
    known = [rows._KNOWN[m["position_ids"]] for m in inputs.step(0)]
    assert [k.cu_seqlens.tolist() for k in known] == [
        [0, 3, 6, 8, 12, *[16] * 11],
        [0, 5, 8, 14, *[16] * 12],
    ]
    assert [k.longest for k in known] == [4, 8]
