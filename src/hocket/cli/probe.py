"""`hocket probe`: find the devices of this machine and measure them and their links."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from hocket.cli.events import print_result, progress_of_phases
from hocket.cli.flags import File, parse_flags
from hocket.cli.next import show
from hocket.cli.terminal import show_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeFlags:
    """Find this machine's devices, measure them and their links, and write a cluster file.

    Attributes:
        quick: use fewer sizes and repeats: under 20 s on two cores instead of under 90 s.
        out: cluster file to write, for --cluster of every other verb (default: only the cache of
            --cluster auto).
        device: device to measure; auto: cuda if available. One of: auto, cpu, cuda.
        svg: write a drawing of the topology to this file.
        json: print events as JSON on stdout, one object a line; the last is the measurement.
    """

    quick: bool = False
    out: File = None
    device: str = "auto"
    svg: File = None
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Probe and print. Returns 0."""
    flags = parse_flags(ProbeFlags, "probe", arguments, ProbeFlags())
    from hocket.jobs import machine

    machine.writable([name for name in (flags.out, flags.svg) if name is not None])
    with progress_of_phases(as_json=flags.json) as on_event:
        found = machine.probe(device=flags.device, quick=flags.quick, on_event=on_event)
    if flags.out is not None:
        machine.save_machine(found, flags.out)
    assert found.measured is not None
    if flags.svg is not None:
        machine.draw_topology(found.measured, flags.svg)
    if flags.json:
        print_result(json.loads(found.measured.to_json()))
        return 0
    show_text(machine.machine_text(found.measured))
    if flags.out is not None:
        print(f"\nwrote {flags.out}")
        show(["plan", "tiny-llama", "--cluster", flags.out, "--global-batch", "32"])
    elif machine.kept(flags.device) == found:
        print("\nkept for --cluster auto")
        show(["plan", "tiny-llama", "--cluster", "auto", "--global-batch", "32"])
    return 0
