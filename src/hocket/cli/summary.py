"""The last words of a training job: what came out, and what can be done with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TextIO

from hocket.cli.next import next_lines
from hocket.cli.progress import silent
from hocket.spec.layout import Layout
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hocket.jobs.record import Summary


def summary_values(summary: Summary) -> dict[str, Any]:
    """The result as plain data: what a run came to, and what was predicted of it."""
    predicted = summary.forecast
    known = predicted is not None and predicted.known
    return {
        **{
            name: value
            for name, value in dataclasses.asdict(
                dataclasses.replace(summary, forecast=None, memory=())
            ).items()
            if name not in ("forecast", "memory")
        },
        "predicted_step_seconds": predicted.step_seconds if known and predicted else None,
        "predicted_peak_bytes": list(predicted.peak_bytes) if known and predicted else None,
    }


def print_summary(summary: Summary, *, to: TextIO) -> None:
    """Print the result in a few lines."""
    for line in ["", *summary_lines(summary), *next_steps(summary)]:
        print(line, file=to)


def summary_lines(summary: Summary) -> list[str]:
    """What came out."""
    found = []
    if summary.loss is not None and summary.first_loss is not None:
        held, perplexity = summary.held_out_loss, summary.held_out_perplexity
        found.append(
            f"loss {summary.first_loss:.4f} -> {summary.loss:.4f} after step {summary.steps}"
            + ("" if held is None else f", {held:.4f} on held-out text")
            + ("" if perplexity is None else f" (perplexity {perplexity:.4g})")
        )
    if summary.tokens_per_second is not None and summary.step_seconds is not None:
        found.append(
            f"{summary.tokens_per_second:,.0f} tokens/s, "
            f"{format_seconds(summary.step_seconds)}/step (medians)"
        )
    if summary.memory_bytes:
        each = summary.memory_bytes
        ends = dict.fromkeys(format_bytes(size) for size in (min(each), max(each)))
        rank = " a rank" if len(each) > 1 else ""
        found.append(f"peak tensor memory {' to '.join(ends)}{rank}")
    if summary.truncated_documents:
        found.append(
            f"documents cut at the length of a row: {summary.truncated_documents:,}; tokens lost: "
            f"{summary.truncated_tokens:,}"
        )
    return found + forecast_lines(summary)


def forecast_lines(summary: Summary) -> list[str]:
    """The prediction, compared with the measurement."""
    forecast = summary.forecast
    if forecast is None:
        return []
    if not forecast.known:
        return [f"no prediction: {forecast.why}"]
    parts = []
    if summary.step_seconds:
        error = forecast.step_seconds / summary.step_seconds - 1
        parts.append(f"{format_seconds(forecast.step_seconds)}/step ({error:+.0%})")
    if summary.bubble is not None and Layout.stored(forecast.layout).num_stages > 1:
        parts.append(f"ranks idle {forecast.bubble:.0%} (measured {summary.bubble:.0%})")
    if summary.memory_bytes and forecast.peak_bytes:
        most, seen = max(forecast.peak_bytes), max(summary.memory_bytes)
        parts.append(f"{format_bytes(most)} on the peak rank ({most / seen - 1:+.0%})")
    return ["predicted: " + ", ".join(parts)] if parts else []


def next_steps(summary: Summary) -> list[str]:
    """Where the run is, and at most two commands to paste."""
    run = str(summary.run)
    if summary.stopped:
        return [
            f"stopped after step {summary.steps}, saved in {summary.run}",
            *([] if silent() else next_lines(["train", "--run", run, "--resume"])),
        ]
    report = "" if summary.report is None else f", report {summary.report}"
    adapter = (summary.run / "adapter").is_dir()
    chats = (summary.run / "model" / "chat_template.jinja").is_file()
    use = ["generate", run, *(["--chat"] if chats else ["--prompt", "Once upon a time"])]
    further = ["serve", run] if summary.report else ["report", run]
    if adapter:
        use = ["export", run, "--merge", "--to", f"{run}-merged"]
    return [
        f"run folder {summary.run}{report}" + (f", adapter {run}/adapter" if adapter else ""),
        *([] if silent() else next_lines(use, further)),
    ]
