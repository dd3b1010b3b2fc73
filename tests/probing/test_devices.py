"""What NVML and /sys say becomes devices, pairs and a cluster, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.catalogue import hardware, machine_file
from hocket.jobs.measured_cluster import measured_cluster
from hocket.probing import devices, network
from hocket.probing.devices import FoundDevices
from hocket.reporting.measured import measured_text
from hocket.reporting.topology import matrix_text, svg
from hocket.spec.cluster import Cluster
from hocket.spec.measured import (
    Curve,
    Host,
    LatencyFit,
    MachineMeasurements,
    MeasuredMatmul,
    MeasuredStream,
)
from tests.probing import nvml


def measured(found: FoundDevices, **more: object) -> MachineMeasurements:
    values = {
        "device": "cuda",
        "date": "2026-11-20T12:00:00Z",
        "torch": "2.13.0",
        "hocket": "0.1.0",
        "host": Host(name="node1", cpu="EPYC", cores=64, memory=2**40),
        "devices": found.devices,
        "pairs": found.pairs,
        "unknown": found.unknown,
        "products": (
            MeasuredMatmul(dtype="bf16", form="nt", m=8192, n=8192, k=8192, seconds=5e-3),
        ),
        "streams": (MeasuredStream(operation="copy", bytes=2**31, seconds=1.4e-3),),
        **more,
    }
    return MachineMeasurements(**values)  # type: ignore[arg-type]


def there_and_back(cluster: Cluster) -> Cluster:
    return machine_file.read_cluster(
        machine_file.cluster_toml(cluster), gpu=hardware.gpu, node=hardware.node, origin="x"
    )


def test_eight_a100_behind_a_switch(tmp_path: Path) -> None:
    recorded = nvml.dgx_a100()
    found = devices.read_nvml(recorded, tmp_path)
    assert recorded.open == 0
    assert len(found.devices) == 8
    assert len(found.pairs) == 28
    one = found.devices[3]
    assert (one.name, one.nvlink, one.links, one.links_total, one.switch) == (
        "NVIDIA A100-SXM4-80GB", 3, 12, 12, True,
    )  # fmt: skip
    assert (one.pcie, one.width, one.bus) == (4, 16, "0000:40:00.0")
    assert one.pcie_rate == pytest.approx(31.5e9, rel=0.01)
    assert {(p.path, p.links, p.peer) for p in found.pairs} == {("NV12", 12, True)}

    cluster = measured_cluster(measured(found))
    link = cluster.node.link
    assert (link.kind, link.bandwidth, link.domain, link.generation) == ("nvswitch", 300e9, 8, 3)
    # The catalogue's A100 of 80 GB, with its data sheet's rates, and the file says so.
    assert cluster.node.gpu == hardware.gpu("A100-SXM-80")
    assert cluster.measured is not None
    assert "A100-SXM-80" in cluster.measured.catalogue[0]
    assert there_and_back(cluster) == cluster
    # No message was measured, so the rates are what twelve links are sold for.
    assert {(p.rate, p.measured) for p in cluster.measured.pairs} == {(300e9, False)}
    assert "(300 GB/s)" in matrix_text(cluster.measured)


def test_links_that_are_down_do_not_count(tmp_path: Path) -> None:
    recorded = nvml.dgx_a100()
    recorded.devices[0]["links"] = [(1, "00000000:C4:00.0", 2)] * 8 + [(0, "", 0)] * 4
    found = devices.read_nvml(recorded, tmp_path)
    assert (found.devices[0].links, found.devices[0].links_total) == (8, 12)
    assert {p.path for p in found.pairs if p.first == 0} == {"NV8"}
    assert measured_cluster(measured(found)).node.link.bandwidth == 200e9


def test_two_bridged_3090(tmp_path: Path) -> None:
    found = devices.read_nvml(nvml.bridged_3090(), tmp_path)
    (pair,) = found.pairs
    assert (pair.path, pair.links, found.devices[0].switch) == ("NV4", 4, False)
    assert found.devices[0].pcie_rate == pytest.approx(15.75e9, rel=0.01)
    cluster = measured_cluster(measured(found))
    link = cluster.node.link
    assert (link.kind, link.bandwidth, link.domain) == ("nvlink-pairs", 56.25e9, 2)
    assert cluster.node.gpu.name == hardware.gpu("RTX 3090").name
    assert there_and_back(cluster) == cluster


def test_cards_that_only_pcie_joins(tmp_path: Path) -> None:
    recorded = nvml.bridged_3090()
    for one in recorded.devices:
        one["links"], one["version"] = nvml.REFUSED, nvml.REFUSED
    recorded.peers = lambda a, b: 5
    found = devices.read_nvml(recorded, tmp_path)
    (pair,) = found.pairs
    assert (pair.path, pair.links, pair.peer) == ("PHB", 0, False)
    assert found.devices[0].nvlink == 0
    link = measured_cluster(measured(found)).node.link
    assert (link.kind, link.generation) == ("pcie", 0)
    recorded.levels = lambda a, b: 10
    link = measured_cluster(measured(devices.read_nvml(recorded, tmp_path))).node.link
    assert link.kind == "pcie-switch"


def test_a_driver_that_refuses_is_reported(tmp_path: Path) -> None:
    recorded = nvml.bridged_3090()
    for one in recorded.devices:
        one["width"] = one["memory"] = nvml.REFUSED
    recorded.levels = lambda a, b: nvml.REFUSED
    found = devices.read_nvml(recorded, tmp_path)
    assert set(found.unknown) == {
        "NVML does not report the memory of 2 of 2 GPUs",
        "NVML does not report the PCIe width of 2 of 2 GPUs",
    }
    assert (found.devices[0].memory, found.devices[0].pcie_rate) == (0, 0.0)
    cluster = measured_cluster(measured(found))
    assert any("PCIe" in text for text in cluster.measured.catalogue)  # type: ignore[union-attr]
    assert there_and_back(cluster) == cluster


def test_a_gpu_that_the_catalogue_does_not_know(tmp_path: Path) -> None:
    recorded = nvml.bridged_3090()
    for one in recorded.devices:
        one["name"] = "NVIDIA Quux 9000"
    gpu = measured_cluster(measured(devices.read_nvml(recorded, tmp_path))).node.gpu
    assert gpu.name == "NVIDIA Quux 9000"
    assert gpu.flops == {"bf16": pytest.approx(2 * 8192**3 / 5e-3, rel=1e-3)}
    assert gpu.bandwidth == pytest.approx(2**31 / 1.4e-3, rel=1e-3)


def test_no_gpu_and_no_driver(tmp_path: Path) -> None:
    silent = nvml.Recorded([], starts=False)
    assert devices.read_nvml(silent, tmp_path) == FoundDevices()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert (
        "NVML does not start: Driver Not Loaded" in devices.read_nvml(silent, tmp_path).unknown[0]
    )


def test_numa_nodes_and_cards_near_a_gpu(tmp_path: Path) -> None:
    bridge = tmp_path / "sys/devices/pci0000:00/0000:00:01.0/0000:0f:00.0"
    gpu, near = bridge / "0000:10:00.0", bridge / "0000:11:00.0"
    far = tmp_path / "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"
    for folder in (gpu, near, far):
        folder.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:10:00.0").symlink_to(gpu)
    for name, place, rate in (
        ("mlx5_0", near, "400 Gb/sec (4X NDR)"),
        ("mlx5_1", far, "100 Gb/sec"),
    ):
        port = tmp_path / f"sys/class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate)
        (port / "state").write_text("4: ACTIVE")
        (port.parents[1] / "device").symlink_to(place)
    # The same card as a network interface, and a virtual one: neither counts again.
    net = tmp_path / "sys/class/net"
    (net / "eth0").mkdir(parents=True)
    (net / "eth0/device").symlink_to(near)
    (net / "eth0/speed").write_text("400000")
    (net / "lo").mkdir()
    cards = network.cards(tmp_path)
    assert {card.name: card.rate for card in cards} == {"mlx5_0": 50e9, "mlx5_1": 12.5e9}
    found = devices.read_nvml(nvml.bridged_3090(), tmp_path)
    assert (found.devices[0].numa, found.devices[0].numa_known) == (1, True)
    assert found.devices[0].nics == ("mlx5_0",)
    assert (found.devices[1].numa_known, found.devices[1].nics) == (False, ())


def test_the_matrix_and_the_drawing(tmp_path: Path) -> None:
    found = devices.read_nvml(nvml.dgx_a100(), tmp_path)
    text = matrix_text(measured(found))
    rows = text.splitlines()
    assert rows[0].split()[:8] == [f"GPU{i}" for i in range(8)]
    assert rows[2].split()[:4] == ["GPU1", "NV12", "-", "NV12"]
    assert "NVSwitch" in text
    drawing = svg(measured(found))
    assert drawing.count("<line ") == 28 + 1
    assert drawing.count("stroke-dasharray") == 28
    assert "NaN" not in drawing


def test_names_are_escaped_in_the_drawing(tmp_path: Path) -> None:
    found = devices.read_nvml(nvml.bridged_3090(), tmp_path)
    host = Host(name="<script>alert(1)</script>\x1b[31m", cpu="&", cores=1)
    drawing = svg(measured(found, host=host))
    assert "<script>" not in drawing
    assert "\x1b" not in drawing
    assert "&lt;script&gt;" in drawing


def test_the_text_says_what_was_taken_and_what_is_unknown(tmp_path: Path) -> None:
    found = devices.read_nvml(nvml.dgx_a100(), tmp_path)
    curve = Curve(
        backend="nccl",
        operation="all-reduce",
        ranks=8,
        world=8,
        sizes=(1024, 2**20),
        seconds=(2e-5, 5e-5),
        lines=(LatencyFit(bytes=2**20, latency=2e-5, rate=2e11),),
        error=0.03,
        worst=0.05,
    )
    cluster = measured_cluster(measured(found, curves=(curve,), unknown=("the weather",)))
    assert cluster.measured is not None
    text = measured_text(cluster.measured)
    assert "NVLink 3, 12 of 12 links active to an NVSwitch" in text
    assert "Taken from the catalogue:\n  A100-SXM-80" in text
    assert "Not measured:\n  the weather" in text
    assert "20 us + 200 GB/s" in text
    assert "3%" in text


def test_what_lies_between_products_is_reported_both_ways(tmp_path: Path) -> None:
    ways = tuple(
        MeasuredStream(operation=way, bytes=2**20, seconds=seconds)
        for way, seconds in (("forward", 4e-5), ("backward", 6e-5))
    )
    text = measured_text(measured(devices.read_nvml(nvml.dgx_a100(), tmp_path), streams=ways))
    assert "1.05 MB a call; forward, backward" in text
    assert "40 us, 60 us" in text
