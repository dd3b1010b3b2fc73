"""Two emulated hosts on a real network: tensor parallelism inside a host against across.

    python -m benchmarks.two_hosts                   as root, with iproute2
    python -m benchmarks.two_hosts --rate 200mbit

Two network namespaces, joined by a pair of virtual cards that `tc` shapes to a rate, hold two ranks
each, which torchrun starts and Gloo joins. `dp2.tp2` is trained in both orders: tp inside a host
and dp across, and the other way round. Each order runs once on the unshaped wire, which gives what
computing and everything but the wire cost; the prediction for the shaped wire adds, for each axis
that crosses it, the recorded collectives' bytes over the rate (`spec.links`: rings, both groups of
an axis sharing the wire), less what an unshaped run's backward hides of the gradients'.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ORDERS = {"tp inside, dp across": "tp-cp-dp-pp", "dp inside, tp across": "dp-cp-tp-pp"}
A, B = "hocket-a", "hocket-b"
ADDRESS = {A: "10.77.0.1", B: "10.77.0.2"}
EFFICIENCY = 0.95
"""Of a shaped rate that is left for data: Ethernet, IP and TCP headers take the rest."""


def cannot() -> str | None:
    """Why this machine cannot emulate hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    probe = subprocess.run(
        ["ip", "netns", "add", "hocket-try"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        return f"the kernel refuses a network namespace: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "hocket-try"], check=False)
    return None


def sh(*words: str) -> None:
    subprocess.run(words, check=True)


def up() -> None:
    """Both hosts and the wire between them."""
    for host in (A, B):
        sh("ip", "netns", "add", host)
    sh("ip", "link", "add", "hktva", "type", "veth", "peer", "name", "hktvb")
    for host, card in ((A, "hktva"), (B, "hktvb")):
        sh("ip", "link", "set", card, "netns", host, "name", "eth0")
        sh("ip", "-n", host, "addr", "add", f"{ADDRESS[host]}/24", "dev", "eth0")
        sh("ip", "-n", host, "link", "set", "lo", "up")
        sh("ip", "-n", host, "link", "set", "eth0", "up")


def down() -> None:
    """Neither."""
    for host in (A, B):
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def shape(rate: str | None) -> None:
    """Shape the wire both ways; None: as fast as it is."""
    for host in (A, B):
        inside = ["ip", "netns", "exec", host, "tc", "qdisc"]
        subprocess.run([*inside, "del", "dev", "eth0", "root"], check=False, capture_output=True)
        if rate is not None:
            # A bucket of at least rate / HZ, and of a segment of 64 KB.
            bucket = ["burst", "256kb", "latency", "50ms"]
            sh(*inside, "add", "dev", "eth0", "root", "tbf", "rate", rate, *bucket)


def train(folder: Path, name: str, order: str, steps: int) -> Path:
    """Train on both hosts; the run folder."""
    run = folder / name
    common = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        f"--master-addr={ADDRESS[A]}", "--master-port=29555",
    ]  # fmt: skip
    # A file, since torchrun takes some of the flags for its own.
    options = {
        "model": "tiny-llama", "data": [str(folder / "text.txt")], "run": str(run),
        "layout": "dp2.tp2", "order": order, "backend": "gloo", "tokenizer": "bytes",
        "seq_len": 128, "global_batch": 16, "steps": steps, "eval_every": 0, "eval_batches": 1,
        "device": "cpu", "timeout": 300.0,
    }  # fmt: skip
    config = folder / f"{name}.toml"
    config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in options.items()))
    job = ["-m", "hocket", "train", "--config", str(config)]
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    hosts = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *common, f"--node-rank={index}", *job],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{name}-{index}.err").open("w"),
        )
        for index, host in enumerate((A, B))
    ]
    try:
        codes = [host.wait(timeout=600) for host in hosts]
    finally:
        for host in hosts:
            if host.poll() is None:
                host.terminate()
                host.wait()
    if any(codes):
        errors = (folder / f"{name}-0.err").read_text()[-2000:]
        raise SystemExit(f"{name} failed:\n{errors}")
    return run


def seconds(run: Path) -> float:
    """Median seconds of a step, the first left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[1:])


def predicted(unshaped: Path, order: str, rate: float) -> float:
    """Seconds of a step on a wire of `rate` bytes/s, from the run on the unshaped wire."""
    from hocket.spec.layout import Layout
    from hocket.spec.links import Links
    from hocket.spec.timeline import Timeline

    layout = Layout.parse("dp2.tp2", order=order)
    links = Links.parse(f"1000GB/sx2+{rate / 1e6!r}MB/s:scale=1.0")
    counted = json.loads((unshaped / "communication.json").read_text())["ranks"][0]
    timeline = Timeline.from_json((unshaped / "timeline.json").read_text())
    added = 0.0
    for row in counted:
        groups = layout.groups(row["axis"]) if row["axis"] in ("dp", "tp") else [(0, 1, 2, 3)]
        crossing = [group for group in groups if links.tier(group) > 0]
        if row["phase"] == "other" or not crossing:
            continue
        # Groups of an axis talk at the same time and share the wire.
        wire = len(crossing) * links.seconds(row["name"], row["bytes"], crossing[0], 4)
        if row["axis"] == "dp":
            # Gradients leave while backward goes on, from about its middle.
            backward = sum(
                e.end - e.start for e in timeline.events if e.rank == 0 and e.kind == "B"
            )
            wire = max(0.0, wire - backward / 2)
        added += wire
    return seconds(unshaped) + added


def bits(rate: str) -> float:
    """`200mbit` -> bytes/s."""
    for unit, size in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * size / 8
    raise SystemExit(f"{rate!r} is not a rate: 200mbit, 1gbit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rate = bits(args.rate) * EFFICIENCY
    why = cannot()
    if why is not None:
        print(f"skipped: {why}")
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = "One melody is dealt note by note to several voices.\n"
        (folder / "text.txt").write_text(line * 2000)
        down()
        try:
            up()
            for title, order in ORDERS.items():
                shape(None)
                free = train(folder, f"free-{order}", order, args.steps)
                shape(args.rate)
                measured = seconds(train(folder, f"shaped-{order}", order, args.steps))
                expected = predicted(free, order, rate)
                rows.append(
                    {
                        "placement": title, "unshaped": seconds(free), "measured": measured,
                        "predicted": expected, "error": expected / measured - 1,
                    }
                )  # fmt: skip
                print(
                    f"{title}: {seconds(free):.3f} s unshaped; at {args.rate} {measured:.3f} s, "
                    f"predicted {expected:.3f} s ({expected / measured - 1:+.0%})",
                    flush=True,
                )
        finally:
            down()
    ratio = rows[1]["measured"] / rows[0]["measured"]
    print(f"tensor parallelism across hosts takes {ratio:.1f} times the step inside one")
    if args.out is not None:
        args.out.write_text(json.dumps({"rate": args.rate, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
