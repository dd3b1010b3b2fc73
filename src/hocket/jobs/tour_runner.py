"""The guide of the tour: a bench that remembers what it ran, so that stops share runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.jobs import links
from hocket.jobs.compare import Bench, CompareRequest, source_with_layers
from hocket.jobs.prepare import job_spec
from hocket.jobs.request import JobRequest, request
from hocket.spec.comparison import Strategy, StrategyResult
from hocket.spec.layout import Layout
from hocket.spec.links import Links

MODEL = "tiny-llama"
SIZES = {"seq_len": 128, "global_batch": 8, "steps": 3}

WIDE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
WIDE_SIZES = {"seq_len": 64, "global_batch": 4, "steps": 4}
"""The model whose communication is emulated: a small batch, of two microbatches."""


class Guide(Bench):
    """A bench that remembers what it ran: stops share runs."""

    def __init__(self, job: JobRequest) -> None:
        super().__init__(job, CompareRequest(input_work=5.0))
        self._ran: dict[tuple[str, int | None], StrategyResult] = {}
        self._scale: float | None = None

    def way(self, layout: str, layers: int | None = None) -> StrategyResult:
        """What a layout came to, of the model with another number of layers if asked."""
        key = (layout, layers)
        if key not in self._ran:
            if not self.referred and layers is None:
                self.reference()
            strategy = Strategy(name=layout, title=layout, layout=Layout.parse(layout))
            source = None if layers is None else source_with_layers(self.source, layers)
            found = self.run(strategy, source=source)
            assert found.ran, found.reason
            self._ran[key] = found
        return self._ran[key]

    def forget(self) -> None:
        """Measure again what is asked for from here on."""
        self._ran.clear()

    def wide(self, layout: str, link: str) -> StrategyResult:
        """What a layout came to on links of a kind, of a model whose products are worth splitting.

        tiny-llama's 128 features are too few: its messages cost more than its computing on any
        link of today.
        """
        from hocket.models.source import ModelSource

        key = (f"{layout} over {link}", None)
        if key not in self._ran:
            source = ModelSource(name="wide", config=WIDE)
            values = {"model": "wide", "device": "cpu", "emulate_links": link, **WIDE_SIZES}
            job = request({**values, "backend": self.request.options.backend})
            if self._scale is None:
                spec = job_spec(source, job, Layout(tp=2), WIDE, "tour")
                emulated = links.settled(self.launcher, spec).options.emulate_links
                assert emulated is not None
                self._scale = Links.parse(emulated).scale
            options = dataclasses.replace(
                job.options, emulate_links=f"{link}:scale={self._scale:g}"
            )
            job = dataclasses.replace(job, options=options)
            strategy = Strategy(name=layout, title=layout, layout=Layout.parse(layout))
            found = self.run(strategy, source=source, request=job)
            assert found.ran, found.reason
            self._ran[key] = found
        return self._ran[key]

    def allowed(self, layout: str, limit: str | None) -> tuple[str, int, int]:
        """What `--memory-per-rank` makes of a layout: why it is refused (or nothing), the bytes
        of its peak rank as predicted, and as counted.
        """
        options = dataclasses.replace(self.request.options, memory_per_rank=limit or "1TB")
        job = dataclasses.replace(self.request, options=options)
        strategy = Strategy(name=layout, title=layout, layout=Layout.parse(layout))
        found = self.run(strategy, request=job)
        if not found.ran:
            return found.reason, 0, 0
        return "", int(found.predicted["required_bytes"]), found.peak_rank["total"]

    @property
    def batch(self) -> int:
        return self.request.workload.global_batch

    @property
    def tokens(self) -> int:
        return self.batch * self.request.workload.seq_len
