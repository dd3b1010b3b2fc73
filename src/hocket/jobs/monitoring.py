"""Monitoring of servers: a Grafana board and Prometheus rules over the metrics that they export."""

from __future__ import annotations

from typing import Any

TTFT = "hocket_time_to_first_token_seconds"
TPOT = "hocket_time_per_output_token_seconds"
WHOLE = "hocket_request_seconds"

_JOB = '{job=~"$job"}'


def _quantiles(metric: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{_JOB}[5m])))", f"p{100 * q:g}")
        for q in (0.5, 0.9, 0.99)
    ]


def _rate(metric: str) -> str:
    return f"sum(rate({metric}{_JOB}[5m]))"


PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    (
        "Requests per second, by status",
        "reqps",
        [(f"sum by (status) (rate(hocket_http_responses_total{_JOB}[5m]))", "{{status}}")],
    ),
    (
        "Output and prompt tokens per second",
        "none",
        [
            (_rate("hocket_completion_tokens_total"), "output"),
            (_rate("hocket_prompt_tokens_total"), "prompt"),
            (_rate("hocket_cached_tokens_total"), "prompt, cached"),
        ],
    ),
    ("Time to first token", "s", _quantiles(TTFT)),
    ("Time per output token", "s", _quantiles(TPOT)),
    ("Time of a request", "s", _quantiles(WHOLE)),
    (
        "Requests under way, running and queued",
        "none",
        [
            (f"sum(hocket_http_requests{_JOB})", "HTTP"),
            (f"sum(hocket_running{_JOB})", "running"),
            (f"sum(hocket_waiting{_JOB})", "queued"),
        ],
    ),
    (
        "Queued prompt tokens, by replica",
        "none",
        [(f"sum by (instance, replica) (hocket_waiting_tokens{_JOB})", "{{instance}} {{replica}}")],
    ),
    (
        "Key/value cache in use, by replica",
        "percentunit",
        [
            (
                f"sum by (instance, replica) (hocket_blocks_used{_JOB}) / "
                f"sum by (instance, replica) (hocket_blocks_total{_JOB})",
                "{{instance}} {{replica}}",
            )
        ],
    ),
    (
        "Prefix cache: found part of the prompt tokens",
        "percentunit",
        [
            (
                f"{_rate('hocket_prefix_hits_total')} / {_rate('hocket_prefix_queries_total')}",
                "hit rate",
            ),
        ],
    ),
    (
        "Blocks that are kept for later prompts",
        "none",
        [(f"sum(hocket_blocks_cached{_JOB})", "blocks")],
    ),
    (
        "Preemptions and recomputed tokens per second",
        "none",
        [
            (_rate("hocket_preempted_total"), "preempted requests"),
            (_rate("hocket_recomputed_tokens_total"), "recomputed tokens"),
        ],
    ),
    (
        "Engine steps and generated tokens per second",
        "none",
        [
            (_rate("hocket_steps_total"), "steps"),
            (_rate("hocket_generated_tokens_total"), "generated tokens"),
        ],
    ),
    (
        "Busiest rank of experts over the mean, by replica",
        "none",
        [
            (
                f"max by (instance, replica, placement) (hocket_expert_imbalance{_JOB})",
                "{{instance}} {{replica}} {{placement}} placement",
            )
        ],
    ),
    ("Replicas that are ready", "none", [(f"sum(hocket_replicas{_JOB})", "ready")]),
    (
        "Finished and cancelled requests per second",
        "reqps",
        [
            (_rate("hocket_finished_total"), "finished"),
            (_rate("hocket_cancelled_total"), "cancelled"),
        ],
    ),
)
"""Title, unit and (expression, legend) of each panel."""

RULES: tuple[tuple[str, str, str, str], ...] = (
    (
        "HocketNoReplica", "sum by (job) (hocket_replicas) == 0", "2m",
        "no replica of {{ $labels.job }} is ready",
    ),
    (
        "HocketSlowFirstToken",
        f"histogram_quantile(0.9, sum by (le, job) (rate({TTFT}_bucket[5m]))) > 5", "10m",
        "one request in ten of {{ $labels.job }} waits over 5 s for its first token",
    ),
    (
        "HocketQueue", "sum by (job) (hocket_waiting) > sum by (job) (hocket_running)", "10m",
        "more requests of {{ $labels.job }} wait than run: add replicas",
    ),
    (
        "HocketPreemption", "sum by (job) (rate(hocket_preempted_total[10m])) > 0.1", "10m",
        "the key/value cache of {{ $labels.job }} is too small for its load",
    ),
    (
        "HocketErrors",
        'sum by (job) (rate(hocket_http_responses_total{status=~"5.."}[5m])) > 0.05 * '
        "sum by (job) (rate(hocket_http_responses_total[5m]))", "5m",
        "over 5% of the responses of {{ $labels.job }} are errors of the server",
    ),
)  # fmt: skip
"""Name, expression, time that it must hold, and text of each alert."""


def grafana_board() -> dict[str, Any]:
    """A Grafana board, in the JSON that Grafana imports: two panels a row."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": "ABCDEF"[k], "expr": text, "legendFormat": legend, "datasource": source}
                for k, (text, legend) in enumerate(targets)
            ],
        }
        for number, (title, unit, targets) in enumerate(PANELS)
    ]
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "job", "type": "query", "label": "Job", "datasource": source, "refresh": 2,
            "query": {"query": "label_values(hocket_replicas, job)", "refId": "job"},
            "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"},
        },
    ]  # fmt: skip
    return {
        "title": "hocket: servers",
        "uid": "hocket-servers",
        "schemaVersion": 39,
        "tags": ["hocket"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": panels,
    }


def rules() -> str:
    """Alerts as a file of Prometheus rules."""
    lines = ["groups:", "  - name: hocket", "    rules:"]
    for name, expression, seconds, text in RULES:
        lines += [
            f"      - alert: {name}",
            "        expr: >-",
            f"          {expression}",
            f"        for: {seconds}",
            "        labels:",
            "          severity: warning",
            "        annotations:",
            f"          summary: '{text}'",
        ]
    return "\n".join(lines) + "\n"
