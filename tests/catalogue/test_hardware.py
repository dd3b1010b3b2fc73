"""Hardware by name: forms that read back, figures per direction, errors with the nearest name."""

import dataclasses
import re
import statistics
from importlib import resources

import pytest

from hocket.catalogue import hardware
from hocket.spec.cluster import LINKS, PRECISIONS
from hocket.spec.errors import OptionError
from hocket.spec.units import parse_bandwidth, parse_flops

GB = 1e9


@pytest.mark.parametrize(
    ("text", "name", "num_nodes", "per_node"),
    [
        ("2x8xH100-SXM", "2x8xH100-SXM-80", 2, 8),
        ("16xA100-40-PCIe", "2x8xA100-PCIe-40", 2, 8),
        ("8xH100-SXM", "1x8xH100-SXM-80", 1, 8),
        ("4xh100", "1x4xH100-SXM-80", 1, 4),
        ("H100-96", "1x1xH100-SXM-96", 1, 1),
        ("8xNVIDIA H100 80GB HBM3", "1x8xH100-SXM-80", 1, 8),
        ("8xRTX 4090", "1x8xRTX4090-24", 1, 8),
        ("2x3090", "1x2xRTX3090-24", 1, 2),
        ("4xaws-p5", "4x8xH100-SXM-80@aws-p5", 4, 8),
        ("4x8xH200@aws-p5en", "4x8xH200-SXM-141@aws-p5en", 4, 8),
        ("DGX-A100", "1x8xA100-SXM-80", 1, 8),
        ("16xGB200", "4x4xGB200-186", 4, 4),
    ],
)
def test_text_forms(text, name, num_nodes, per_node):
    found = hardware.cluster(text)
    assert (found.name, found.num_nodes, found.node.num_gpus) == (name, num_nodes, per_node)
    assert found.num_gpus == num_nodes * per_node
    assert hardware.cluster(found.name) == found


@pytest.mark.parametrize("name", hardware.gpu_names())
def test_every_gpu_has_a_node_and_both_forms_read_back(name, tmp_path):
    entry = hardware.gpu(name)
    assert hardware.gpu(name.lower()) is entry
    assert entry.source
    assert set(entry.flops) <= set(PRECISIONS)
    assert 0.8 * entry.memory < entry.usable < 1.1 * entry.memory
    found = hardware.cluster(f"2x1x{name}")
    assert hardware.cluster(found.name) == found
    file = tmp_path / "machine.toml"
    file.write_text(hardware.to_toml(found))
    assert hardware.cluster(str(file)) == found


@pytest.mark.parametrize("name", hardware.node_names())
def test_every_node_reads(name):
    found = hardware.node(name)
    assert found.link.kind in LINKS
    assert found.source
    assert found.network / found.nics <= 100 * GB
    file = resources.files("hocket.catalogue") / "data" / "hardware" / "nodes.toml"
    assert "PER DIRECTION" in file.read_text()


def test_bandwidths_are_per_direction():
    link = hardware.cluster("8xA100-80").node.link
    assert (link.kind, link.bandwidth, link.generation) == ("nvswitch", 300 * GB, 3)
    assert hardware.cluster("8xH100").node.link.bandwidth == 450 * GB
    assert hardware.cluster("8xA100-PCIe").node.pcie == 31.5 * GB
    assert hardware.cluster("8xH100").node.network == 8 * 50 * GB  # eight cards of 400 Gb/s
    assert "PER DIRECTION" in (
        (resources.files("hocket.catalogue") / "data" / "hardware" / "gpus.toml").read_text()
    )


def test_topologies():
    bridged = hardware.cluster("4xRTX3090").node.link
    assert (bridged.kind, bridged.domain, bridged.bandwidth) == ("nvlink-pairs", 2, 56.25 * GB)
    assert hardware.cluster("4xRTX4090").node.link.kind == "pcie"
    assert hardware.cluster("8xV100").node.link.kind == "nvlink-mesh"
    assert hardware.cluster("72xGB200").domain == 72
    assert hardware.cluster("8xGB200").domain == 8
    assert hardware.cluster("4x8xH100").domain == 8
    assert hardware.gpu("H100").memory == 80 * GB
    assert hardware.gpu("H100-94").memory == 94 * GB
    assert hardware.gpu("H100-96").memory == 96 * GB


def test_a_quarter_comes_before_its_later_days():
    said = hardware.gpu("H100-SXM-80").price_source
    assert "2026-Q1 to 2026-11" in said
    once = hardware.gpu("RTX4090").price_source
    assert once.count("2026") == 1


def test_prices_are_dated():
    entry = hardware.gpu("H100")
    quotes = hardware.quotes("H100")
    assert entry.price is not None
    assert min(q.dollars for q in quotes) <= entry.price <= max(q.dollars for q in quotes)
    assert "on-demand quotes" in entry.price_source
    assert all(quote.date and quote.source for quote in quotes)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("8xH10O", "unknown GPU", "H100"),
        ("8xA10O-SXM", "unknown GPU", "A100-SXM"),
        ("1x16xH100", "holds 8", "2x8xH100-SXM-80"),
        ("4x8xGB200", "holds 4", "8x4xGB200-186"),
        ("2x0xH100", "not 0", "1x8xH100-SXM-80"),
        ("12xH100", "do not fill", "2x6xH100-SXM-80"),
        ("2x8xDGX-H100", "kind of node", "2xDGX-H100"),
        ("0xH100", "no GPU", "8xH100"),
        ("8xRTX4090@DGX-H100", "not sold with", "pcie"),
        ("nowhere.toml", "no file nowhere.toml", "hocket probe --out nowhere.toml"),
        ("nowhere.json", "no file nowhere.json", "--cluster 8xH100-SXM-80"),
        ("no/where", "no file no/where", "hocket probe --out no/where"),
        (".", ". is a folder", "--cluster ./cluster.toml"),
        ("aws-g5.48xlarg", "unknown GPU or node", "aws-g5.48xlarge"),
    ],
)
def test_errors_name_what_is_near(text, message, hint):
    with pytest.raises(OptionError) as error:
        hardware.cluster(text)
    assert message in error.value.message
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b'{"num_nodes": 2}', "is not TOML, in which a cluster is written"),
        (b"", "is not a cluster: it has no node"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_no_cluster(tmp_path, written, message):
    file = tmp_path / "machine.json"
    file.write_bytes(written)
    with pytest.raises(OptionError, match=message) as error:
        hardware.cluster(str(file))
    assert str(file) in error.value.message
    assert error.value.hint


def test_a_file_is_read_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = hardware.cluster("2x8xH100")
    for name in ("machine.json", "mine"):
        (tmp_path / name).write_text(hardware.to_toml(cluster))
        assert hardware.cluster(name) == cluster
    (tmp_path / "H200").write_text(hardware.to_toml(cluster))
    assert hardware.cluster("H200").node.gpu.name == "H200-SXM-141"
    assert hardware.cluster(str(tmp_path / "H200")) == cluster


MINE = """
gpu = "H100"
num_nodes = 2
[node]
num_gpus = 8
network = "400 Gb/s"
nics = 8
pcie = "63 GB/s"
host_memory = "2 TB"
host_bandwidth = "614.4 GB/s"
link = { kind = "nvswitch", domain = 8, bandwidth = "450 GB/s", generation = 4 }
"""


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("450 GB/s", "900 GB/s", "NVLink 4", "sum of both directions"),
        ("400 Gb/s", "400 GB/s", "network", "bits"),
        ('"63 GB/s"', "63", "unit", "GB/s"),
        ('"2 TB"', '"2 T"', "'2 T'", ""),
        ("614.4 GB/s", "614.4 TB/s", "host_bandwidth", ""),
        ("network", "netwrok", "netwrok", "network"),
        ("nvswitch", "nv-switch", "nv-switch", "nvswitch"),
        ('gpu = "H100"', 'gpu = "H1000"', "H1000", "H100"),
        ("nics = 8", "nics = 0", "nics", ""),
        ("nics = 8", "", "nics", ""),
        ("generation = 4", "generation = inf", "generation inf is unknown", ""),
        ("generation = 4", "generation = []", "generation [] is unknown", ""),
        ("num_nodes = 2", "num_nodes = ", "TOML", ""),
        ("num_nodes = 2", "num_nodes = 99999999", "at most 1,000,000", ""),
        ("num_nodes = 2", "num_nodes = 2\nmeasured = 5", "measured is 5", ""),
        ("num_nodes = 2", 'num_nodes = 2\nname = "a\\nb"', "one line", ""),
        ('gpu = "H100"', "gpu = 5", "a name or a table", ""),
        ('"400 Gb/s"', '"0 Gb/s"', "need a network between them", ""),
        ('"63 GB/s"', '"0 GB/s"', "pcie of 0 GB/s", ""),
        ('"450 GB/s"', '"0 GB/s"', "cannot be", ""),
        ('"450 GB/s"', "-5", "'-5' is not a bandwidth", ""),
        ('"450 GB/s"', "true", "'True' is not a bandwidth", ""),
        ("generation = 4", "generation = 99", "generation 99 is unknown", ""),
        ("generation = 4", 'generation = "x"', "generation 'x' is unknown", ""),
        ("generation = 4 }", "generation = 4, domian = 8 }", "domian", "domain"),
    ],
)
def test_a_file_of_ones_own_is_checked(tmp_path, old, new, message, hint):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    found = hardware.cluster(str(file))
    assert found.node == dataclasses.replace(hardware.cluster("2x8xH100").node, name="", source="")
    file.write_text(MINE.replace(old, new, 1))
    with pytest.raises(OptionError) as error:
        hardware.cluster(str(file))
    assert message in error.value.message
    assert hint in (error.value.hint or "")


CARD = """
[gpu]
name = "mine"
flops = { bf16 = "300 TFLOP/s" }
memory = "48 GB"
bandwidth = "900 GB/s"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{ bf16 = "300 TFLOP/s" }', "5", "is 5; it is a rate for each"),
        ('{ bf16 = "300 TFLOP/s" }', "{}", "is a rate for each"),
        ("300 TFLOP/s", "0 TFLOP/s", "cannot be"),
        ("300 TFLOP/s", "1e300 TFLOP/s", "cannot be"),
        ("bf16", "bf17", "bf17"),
        ("48 GB", "48 Gb", "counts bits"),
        ("48 GB", "9" * 400 + " GB", "not a size in bytes"),
        ("900 GB/s", "0 GB/s", "cannot be"),
        ("900 GB/s", "900 TB/s", "cannot be"),
        ('"mine"', "5", "name is 5"),
        ('"mine"', '"mine"\nprice = nan', "price is nan"),
        ('"mine"', '"mine"\nprice = -4', "price is -4"),
        ('"mine"', '"mine"\nprice = "4 dollars"', "price is '4 dollars'"),
        ('"mine"', '"mine"\nusable = "60 GB"', "usable is 60 GB, of 48 GB"),
        ('"mine"', '"mine"\naliases = 5', "list of names"),
        ('"mine"', '"mine"\nnvlink = "x"', "generation 'x'"),
        ('"mine"', '"mine"\nsms = 3.5', "sms is 3.5"),
    ],
)
def test_a_card_of_ones_own_is_checked(tmp_path, old, new, message):
    file = tmp_path / "mine.toml"
    text = MINE.replace('gpu = "H100"', "") + CARD
    file.write_text(text)
    assert hardware.cluster(str(file)).node.gpu.name == "mine"
    assert old in CARD
    file.write_text(MINE.replace('gpu = "H100"', "") + CARD.replace(old, new, 1))
    with pytest.raises(OptionError, match=re.escape(message)):
        hardware.cluster(str(file))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\x00\xff")
    with pytest.raises(OptionError, match="cannot be read"):
        hardware.cluster(str(file))


def test_units():
    assert parse_bandwidth("400 Gb/s") == 50 * GB
    assert parse_bandwidth("1.8 TB/s") == 1.8e12
    assert parse_flops("989 TFLOP/s") == 989e12
    for text in ("400", "400 GB", "1..2 GB/s"):
        with pytest.raises(OptionError):
            parse_bandwidth(text)


def test_prices_by_list_have_range_and_date() -> None:
    machines = hardware.cluster("8xH100-SXM")
    found = {name: hardware.with_prices(machines, name).node.gpu for name in hardware.PRICE_LISTS}
    assert found["all"].price == machines.node.gpu.price
    for name, providers in hardware.PRICE_LISTS.items():
        quotes = [
            quote.dollars
            for quote in hardware.quotes("H100-SXM-80")
            if quote.tier.startswith("on-demand") and (not providers or quote.provider in providers)
        ]
        entry = found[name]
        assert entry.price == pytest.approx(statistics.median(quotes), abs=1e-4)
        for value in (min(quotes), max(quotes)):
            assert f"{value:g}" in entry.price_source
        assert "read 2026" in entry.price_source
    assert found["hyperscaler"].price > found["specialist"].price
    assert set(hardware.HYPERSCALERS).isdisjoint(hardware.SPECIALISTS)
    with pytest.raises(OptionError, match="unknown price list"):
        hardware.with_prices(machines, "hyperscalers")


def test_a_gpu_without_a_quote_says_so() -> None:
    for name in ("MI300X", "H20", "GB200", "V100-SXM"):
        device = hardware.gpu(name)
        assert device.price is None
        assert hardware.price_text(device).startswith(f"no price for {device.name}")
    only = hardware.with_prices(hardware.cluster("8xMI300X"), "hyperscaler").node.gpu
    assert "no hyperscaler on-demand quote was read" in hardware.price_text(only)
