"""A rehearsal as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.spec.expert_dispatch import DEEPEP
from hocket.spec.rehearsal import DEEPEP_NOT_SEEN, NOT_COMPILED, NOT_SEEN, OWNERS
from hocket.spec.units import format_bytes

if TYPE_CHECKING:
    from hocket.jobs.rehearse import Rehearsed
    from hocket.simulation.nccl import OrderVerdict

MOST_ROWS = 16
"""Ranks that are listed one by one."""


def rehearsal_report(found: Rehearsed) -> str:
    unseen = [*NOT_SEEN, *[NOT_COMPILED] * (not found.report.generated)]
    if found.job.spec.options.expert_dispatch == DEEPEP:
        unseen.append(DEEPEP_NOT_SEEN)
    parts = [
        _title(found),
        _verdict(found),
        _memory(found),
        _collectives(found),
        _groups(found),
        _host_reads(found),
        _launches(found),
        _generated(found),
        _schedule(found),
        "Not seen: " + "; ".join(unseen) + ".",
    ]
    return "\n\n".join(part for part in parts if part)


def _title(found: Rehearsed) -> str:
    spec, job = found.job.spec, found.job
    layout, workload = spec.layout, spec.workload
    seconds = sum(rank.seconds for rank in found.executed.values())
    return (
        f"{spec.model} at {layout} on {layout.world_size} x {job.device.name}: sequences of "
        f"{workload.seq_len}, global batch {workload.global_batch}, {workload.dtype}\n"
        f"{len(found.executed)} of {layout.world_size} ranks executed in {seconds:.1f} s; no GPU "
        "has executed this yet"
    )


def _verdict(found: Rehearsed) -> str:
    if not found.verdicts:
        return "completes: unknown, one rank alone was executed"
    return "\n".join(verdict_lines(found.verdicts, found.job.spec.layout.world_size))


def verdict_lines(verdicts: Mapping[str, OrderVerdict], ranks: int) -> list[str]:
    """Whether a job of so many ranks completes under each rule; where not, the cycle."""
    lines = []
    rules = {
        "eager": "groups bound to a device, as hocket creates them",
        "lazy": "groups that are not bound",
    }
    for rule, verdict in verdicts.items():
        if verdict.ok:
            answer = "every rank completes"
        elif verdict.ends:
            answer = "completes, but calls do not match"
        else:
            answer = f"{len(verdict.waiting)} of {ranks} ranks deadlock"
        lines.append(f"NCCL, {rule} ({rules[rule]}): {answer}")
        lines += [f"    {line}" for line in verdict.mismatches[:4]]
        if verdict.cycle:
            lines += [f"    {line}" for line in verdict.picture().splitlines()[:12]]
        elif verdict.waiting:
            lines += [f"    {waiting}" for waiting in verdict.waiting[:8]]
    return lines


def _table(headers: list[str], rows: list[list[Any]]) -> str:
    from hocket.reporting.table import table_text

    return table_text(headers, rows)


def _memory(found: Rehearsed) -> str:
    report = found.report
    predicted = dict(zip(found.stands_for, report.predicted_peak_bytes, strict=True))
    rows = {row["rank"]: row for row in report.peak_bytes}
    owners = [o for o in OWNERS if any(row[o] for row in rows.values())]
    lines = []
    times: dict[int, int] = {}
    for first in found.stands_for.values():
        times[first] = times.get(first, 0) + 1
    for rank in sorted(found.executed)[:MOST_ROWS]:
        row = rows[rank]
        stage = found.job.spec.layout.coordinate(rank)["pp"]
        expected = predicted[rank]
        line = [rank, stage, times[rank], *(format_bytes(row[o]) for o in owners)]
        line += [format_bytes(row["total"])]
        if expected is not None:
            line += [format_bytes(expected), f"{expected / row['total'] - 1:+.1%}"]
        lines.append(line)
    headers = ["rank", "stage", "ranks", *owners, "peak"]
    if len(lines[0]) > len(headers):
        headers += ["predicted", "error"]
    out = "Peak memory per rank, by owner\n" + _table(headers, lines)
    peak, capacity = max(row["total"] for row in rows.values()), found.job.device.memory
    out += (
        f"\npeak rank: {format_bytes(peak)} of {format_bytes(capacity)} "
        f"({peak / capacity:.0%}){'' if peak <= capacity else ': DOES NOT FIT'}"
    )
    if "memory" in found.reasons:
        out += f"\nnot predicted: {found.reasons['memory']}"
    return out


def _collectives(found: Rehearsed) -> str:
    from hocket.reporting.collectives import collectives_text

    rows = found.report.collectives
    if any(row["expected_count"] is None for row in rows):
        keys = ("name", "axis", "phase", "count", "bytes")
        rows = [{key: row[key] for key in keys} for row in rows]
    out = "Collectives of the job, summed over ranks\n" + collectives_text(rows)
    if "collectives" in found.reasons:
        out += f"\nno theory: {found.reasons['collectives']}"
    return out


def _groups(found: Rehearsed) -> str:
    groups = found.report.process_groups
    if not groups["groups"]:
        return ""
    rows = [
        ["+".join(row["axes"]), row["size"], row["operations"], format_bytes(row["bytes"])]
        for row in groups["groups"]
    ]
    each = groups["communicators_per_rank"]
    return (
        f"Process groups of rank {groups['rank']}\n"
        + _table(["axes", "ranks", "operations", "bytes"], rows)
        + f"\n{groups['per_rank']} of {groups['in_job']} groups of the job, created in "
        f"{groups['calls']} calls; communicators per rank: {each['eager']} eager, "
        f"{each['lazy']} lazy"
    )


def _host_reads(found: Rehearsed) -> str:
    reads = found.report.host_reads
    if not reads:
        return "Host reads per step: none"
    rows = [[row["what"], row["where"], row["count"], len(row["ranks"])] for row in reads]
    return "Host reads per step: the host waits for the device\n" + _table(
        ["what", "where", "per step", "executed ranks"], rows
    )


def _launches(found: Rehearsed) -> str:
    launches = found.report.launches_per_step
    most, least = max(launches["kernels"]), min(launches["kernels"])
    count = f"{most:,}" if most == least else f"{least:,} to {most:,}"
    chosen = ", ".join(f"{kernel} {count:,}" for kernel, count in launches["attention"].items())
    return f"Kernels launched per step and rank: {count}" + (
        f"; attention calls of the job: {chosen}" if chosen else ""
    )


def _generated(found: Rehearsed) -> str:
    of = found.report.generated
    if not of:
        return ""
    major, minor = found.job.device.capability
    return (
        f"Generated for sm_{major}{minor}: {of['kernels']:,} kernels, {of['launches']:,} of the "
        f"launches, at most {of['shared_bytes']:,} bytes of shared memory; graphs: {of['graphs']}, "
        f"graph breaks: {of['graph_breaks']}"
    )


def _schedule(found: Rehearsed) -> str:
    if found.job.schedule.num_stages < 2:
        return ""
    layout = found.job.spec.layout
    lines: dict[int, str] = {}
    for rank, executed in sorted(found.executed.items()):
        lines.setdefault(layout.coordinate(rank)["pp"], " ".join(executed.actions))
    width = 110
    return "Schedule as executed, by pipeline rank\n" + "\n".join(
        f"{pp}  {line if len(line) <= width else line[: width - 4] + ' ...'}"
        for pp, line in sorted(lines.items())
    )
