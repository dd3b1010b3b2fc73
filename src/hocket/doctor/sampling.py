"""Sampling checks: tokens chosen on the device, compared with the CPU's sampler and with a sort.

Not executed on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CheckOutcome, row_of
from hocket.doctor.place import Place

if TYPE_CHECKING:
    from torch import Tensor

DRAWS = 512
"""Draws of each row of logits, at evenly spaced numbers in [0, 1)."""

_row = row_of(
    "hocket.doctor.sampling", prefix="kernel-", group="kernels", seconds=1.5, timeout=90.0
)

CHECKS = (
    *(
        _row(
            f"sample-{name}", f"64 rows sampled on the device: {what}; compared with the CPU's "
            "sampler", "compare_samples",
            "the same tokens in 4 steps of 64 rows; the device is read once a "
            "step, and nothing waits for it before (torch.cuda.set_sync_debug_mode)",
            arguments={"options": options},
        )
        for name, what, options in (
            ("greedy", "the largest logit", {}),
            ("temperature", "temperature 0.7", {"temperature": 0.7}),
            ("top-k", "the 40 largest logits", {"temperature": 0.7, "top_k": 40}),
            ("top-p", "0.9 of the probability", {"temperature": 1.0, "top_p": 0.9}),
            ("min-p", "0.05 of the largest probability", {"temperature": 1.0, "min_p": 0.05}),
            ("penalties", "repetition and presence penalties", {
                "repetition_penalty": 1.3, "presence_penalty": 0.5,
            }),
        )
    ),
    _row(
        "logprobs", "log-probabilities and the 5 most probable tokens, compared with the CPU",
        "compare_logprobs", "within 1e-4, the same tokens",
    ),
    _row(
        "sample-sort", f"{DRAWS} draws from one row at evenly spaced numbers, with every kind of "
        "cut; compared with probabilities that a sort in fp64 on the CPU keeps", "by_sort",
        "each token is drawn as often as its probability, within 1 draw", seconds=2.0,
    ),
)  # fmt: skip


def _logits(place: Place) -> tuple[Tensor, Tensor]:
    """Rows of logits [64, V] on the CPU, and the same on the place's device."""
    import torch

    vocabulary = place.size(128256, 4096)
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    return logits, logits.to(place.device)


def compare_samples(place: Place, *, options: dict[str, Any]) -> CheckOutcome:
    """Tokens of the device's sampler and of the CPU's, for equal logits and seeds."""
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder
    from hocket.serving.engine.device_sampler import DeviceSampler
    from hocket.serving.engine.sampler import Sampler
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.serving.request import SamplingParams
    from hocket.serving.scheduling.admission import Admission
    from hocket.serving.scheduling.step import LAST, BatchRow, StepPlan

    here, there = _logits(place)
    rows, vocabulary = here.shape
    whole = Vocabulary(axis=Axis("tp"))
    host = Sampler(whole, vocabulary, "cpu", Recorder(), rows)
    device = DeviceSampler(whole, vocabulary, str(place.device), Recorder(), rows)
    prompt = tuple(range(3, 40))
    admitted = [
        Admission(
            slot=slot, sampling=SamplingParams(**{"seed": 1000 + slot, **options}),
            prompt_length=len(prompt), prompt=prompt,
        )
        for slot in range(rows)
    ]  # fmt: skip
    for number in range(4):
        work = [BatchRow(slot, len(prompt) - 1 + number, 1, LAST) for slot in range(rows)]
        plan = StepPlan(number, work, [7] * rows, admitted if number == 0 else [])
        tokens = []
        for sampler, logits in ((host, here), (device, there)):
            given = logits.roll(number, 0).clone()
            sampler.begin(plan)
            if sampler is device:
                with place.no_waits():
                    launched = device.launch(given, plan)
                result = None if launched is None else launched.result()
            else:
                result = sampler.sample(given, plan)
            assert result is not None
            tokens.append(list(result.tokens))
        equal = sum(a == b for a, b in zip(*tokens, strict=True))
        if equal != rows:
            place.failures.append(f"step {number}: {rows - equal} of {rows} rows have other tokens")
    place.equal("reads of the device in 4 steps", device.readback.reads, 4)
    return place.outcome(rows=rows)


def compare_logprobs(place: Place) -> CheckOutcome:
    """Log-probabilities from a summary of each row, and torch's log_softmax in fp64."""
    from hocket.serving.engine.logprobs import combined_logprobs, entries, logits_summary

    here, there = _logits(place)
    wanted = here.argmin(-1)
    combined = combined_logprobs(logits_summary(there, wanted.to(place.device), 5).unsqueeze(0))
    found = entries(combined.cpu().tolist(), wanted.tolist(), [5] * len(wanted))
    exact = here.double().log_softmax(-1)
    worst = 0.0
    for row, one in enumerate(found):
        best = exact[row].topk(5)
        place.equal(f"the tokens of row {row}", [t for t, _ in one.top], best.indices.tolist())
        pairs = zip([v for _, v in one.top], best.values.tolist(), strict=True)
        worst = max(worst, abs(one.logprob - float(exact[row, wanted[row]])))
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    place.values["largest_difference"] = worst
    if not worst <= 1e-4:
        place.failures.append(f"log-probabilities differ by {worst:.2g}")
    return place.outcome()


# --- a sort ----------------------------------------------------------------------------------

_CUTS: tuple[dict[str, float], ...] = (
    {"temperature": 0.7}, {"temperature": 0.7, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05}, {"temperature": 0.9, "top_k": 50, "top_p": 0.8},
)  # fmt: skip


def kept_by_sort(logits: Tensor, cut: dict[str, float]) -> Tensor:
    """Probabilities [V] in fp64 of the tokens that a cut keeps, 0 for others.

    The largest first: `top_k` of them, of these the fewest whose probability is `top_p` or more, of
    these those of at least `min_p` of the largest.
    """
    import torch

    order = torch.sort(logits.double() / cut["temperature"], descending=True, stable=True)
    values = order.values
    if "top_k" in cut:
        values = values.masked_fill(torch.arange(len(values)) >= cut["top_k"], -torch.inf)
    kept = values.softmax(0)
    if "top_p" in cut:
        kept = kept * (kept.cumsum(0) - kept < cut["top_p"])
    if "min_p" in cut:
        kept = kept * (kept >= cut["min_p"] * kept[0])
    return torch.zeros_like(kept).scatter_(0, order.indices, kept / kept.sum())


def by_sort(place: Place) -> CheckOutcome:
    """How often each token is drawn, against its probability."""
    import torch

    from hocket.serving.engine.device_draw import DeviceChoices, draw_on_device

    here, _ = _logits(place)
    at = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    for number, cut in enumerate(_CUTS):
        rows = here[number].to(place.device).expand(DRAWS, -1)

        def column(name: str, dtype: Any, cut: dict[str, float] = cut) -> Tensor | None:
            if name not in cut:
                return None
            return torch.full((DRAWS,), cut[name], dtype=dtype, device=place.device)

        choices = DeviceChoices(
            at=at.to(place.device), temperature=column("temperature", torch.float32),
            top_k=column("top_k", torch.long), most=int(cut.get("top_k", 0)),
            top_p=column("top_p", torch.float32), min_p=column("min_p", torch.float32),
        )  # fmt: skip
        with place.no_waits():
            tokens, good = draw_on_device(rows, choices)
        place.equal(f"rows of cut {number + 1} that could be drawn", int(good.sum()), DRAWS)
        drawn = torch.bincount(tokens.cpu(), minlength=here.shape[1]).double()
        wanted = kept_by_sort(here[number], cut) * DRAWS
        off = float((drawn - wanted).abs().max())
        place.values[f"cut_{number + 1}_largest_difference"] = off
        if not off <= 1.0 + 1e-3 * DRAWS:
            place.failures.append(
                f"{cut}: a token is drawn {off:.2f} times too often or too rarely"
            )
        outside = int(drawn[wanted == 0].sum())
        if outside > 1:  # one draw is left to the rounding at the edge of a cut
            place.failures.append(f"{cut}: {outside} draws of tokens that the sort cuts off")
    return place.outcome(draws=DRAWS * len(_CUTS))
