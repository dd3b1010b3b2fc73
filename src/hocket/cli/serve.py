"""`hocket serve`: answer OpenAI's requests with a model that is split over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from hocket.cli.events import json_events
from hocket.cli.flags import Folder, Model, Run, Text, explicit, flag_values, parse_flags
from hocket.cli.progress import DownloadLines, progress_of, silent
from hocket.spec.errors import OptionError
from hocket.spec.serving import ServeOptions
from hocket.spec.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model to OpenAI's clients, split over tp and pp, with dp replicas behind one address.

    Ctrl-C or SIGTERM lets running requests end; a second one ends everything at once.

    Attributes:
        model: Hugging Face directory with weights and a tokenizer, run folder, PEFT adapter, or
            ORG/NAME[@REVISION] on the Hugging Face Hub.
        layout: tp2 for latency, pp2 across slow links, dp2 for load, or all: tp2.pp2.dp2; auto: the
            fastest on this machine, by measurement (default: dp1).
        pipeline_split: layers per pipeline stage: balanced (by cost), even, or a list such as 3-5
            (default: balanced).
        run: run folder (default: a new folder under runs/).
        cluster: machine to predict the server for, and to choose --layout auto for: auto (this
            machine), a file written by `hocket probe`, or none.
        serving: Requests, cache and limits
        dtype: compute precision; auto is bf16 on GPUs that have it, else fp32. One of: auto, fp32,
            bf16.
        tokenizer: a directory, or `bytes` (default: the model's own).
        attention: attention implementation of the proxy check before ranks start; requests use
            paged attention. One of: sdpa, eager.
        emulate_links: links to emulate between CPU ranks, as in pcie4 or nvlink3x2+net100g
            (default: this machine's memory speed).
        timeout: seconds a replica may be silent before it is restarted.
        dry_run: check all options, that the ports are free and the host is this machine's, and
            rehearse the steps of one replica on fake H100s; start nothing.
        json: print events as JSON on stdout, one object a line, and nothing else there.
    """

    model: Model = ""
    layout: Text = None
    pipeline_split: Text = None
    run: Run = None
    cluster: str = "auto"
    serving: ServeOptions = dataclasses.field(default_factory=ServeOptions)
    dtype: str = "auto"
    tokenizer: Folder = None
    attention: str = "sdpa"
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1
    emulate_links: Text = None
    timeout: float = 120.0
    trust_remote_code: bool = False
    dry_run: bool = False
    json: Annotated[bool, tyro.conf.arg(name="json")] = False


def main(arguments: Sequence[str]) -> int:
    """Serve. Returns 0 after a signal, also where requests outlasted --drain-seconds, and 1 where a
    second signal cut some."""
    flags = parse_flags(Serve, "serve", arguments, Serve())
    if not flags.model:
        raise OptionError("no model was named", hint="hocket serve RUN_OR_DIR --port 8000")
    said = flag_values(flags, also=explicit(arguments))
    for name in ("json", "model", "dry_run"):
        said.pop(name, None)
    if flags.dry_run:
        from hocket.cli.rehearse import print_serving
        from hocket.jobs.serving import request
        from hocket.jobs.serving.rehearse import replica_of
        from hocket.jobs.serving.start import require_startable

        server = request.server({"model": flags.model, **said}, any_size=True)
        require_startable(server)
        return print_serving(
            replica_of(server), gpu="H100", as_json=flags.json, as_event=flags.json
        )
    from hocket.jobs.serving.server import serve_model

    with json_events() if flags.json else contextlib.nullcontext(Lines()) as on_event:
        served = serve_model(flags.model, on_event=on_event, **said)
    if served is None:  # a rank of another launcher, whose rank 0 has the summary
        return 0
    if not flags.json:
        _summary(served)
    return 1 if served.forced else 0


class Lines:
    """Events as lines for a person."""

    def __init__(self) -> None:
        self._progress = DownloadLines()

    def __call__(self, event: dict[str, Any]) -> None:
        # The reader may be gone: a server continues without.
        with contextlib.suppress(BrokenPipeError):
            if event["event"] == "progress":
                self._progress(progress_of(event))
            else:
                _line(event)


def _line(event: dict[str, Any]) -> None:
    match event["event"]:
        case "phase" if not silent():
            print(f"{event['name']} ...", flush=True)
        case "note" if not silent():
            print(event["text"], flush=True)
        case "ready":
            print(_ready(event), flush=True)


def _ready(event: dict[str, Any]) -> str:
    address, each = event["address"], event["replicas"]
    held = min((one.get("cache_tokens", 0) for one in each), default=0)
    size = sum(one.get("num_blocks", 0) * one.get("bytes_per_block", 0) for one in each[:1])
    room = f"; the cache of a replica holds {held:,} tokens" if held else ""
    of = f" ({format_bytes(size)} on its first rank)" if size else ""
    # Of a line `NAME KEY` the last word is the key; lines that begin with # are comments.
    file = event.get("api_key_file")
    key = file and f"$(awk 'NF && $1 !~ /^#/ {{print $NF; exit}}' {shlex.quote(file)})"
    sent = f' -H "Authorization: Bearer {key}"' if key else ""
    return (
        f"ready after {event['seconds']:.1f} s: {event['model']} in {event['layout']} at "
        f"{address}/v1{room}{of}\n"
        f"  a chat page: {address}/    metrics: {event['metrics']}/metrics    "
        f"run folder: {event['run']}\n"
        f"  curl {address}/v1/completions -H 'content-type: application/json'{sent} "
        f'-d \'{{"prompt": "Once", "max_tokens": 16}}\''
    )


def _summary(served: Any) -> None:
    from hocket.cli.next import show

    found = served.measured
    with contextlib.suppress(BrokenPipeError):
        if found.requests:
            print(
                f"{found.requests:,} request{'s' * (found.requests != 1)} answered, "
                f"{found.output_tokens:,} tokens ({found.tokens_per_second:,.0f} tokens/s while "
                f"there were any); first token after {1e3 * found.ttft.p50:.1f} ms, then "
                f"{1e3 * found.tpot.p50:.1f} ms each (medians)"
            )
        if not served.run.exists():
            return
        show(["report", str(served.run)])
