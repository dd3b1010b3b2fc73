"""Links as words and numbers: text that reads back, rates each way, groups on their wires."""

from __future__ import annotations

import pytest

from hocket.spec.errors import OptionError
from hocket.spec.link_kinds import KINDS
from hocket.spec.links import Links, ring_hops, ring_share


@pytest.mark.parametrize(
    "text",
    [
        "nvlink3",
        "pcie4@H100-SXM-80",
        "nvlink3x2+net100g",
        "nvlink4-meshx2+pcie5x4+net400g@H100-SXM-80:scale=5200.5",
        "12GB/sx2+40Gb/s:scale=1.0",
    ],
)
def test_text_reads_back(text: str) -> None:
    assert str(Links.parse(text)) == text
    assert Links.parse(str(Links.parse(text))) == Links.parse(text)


def test_rates_are_each_way() -> None:
    # Marketed as 600 GB/s and 32 GB/s, which looks like 19 (or 37 beside an x8 slot's 16).
    assert KINDS["nvlink3"].rate / KINDS["pcie4"].rate == pytest.approx(9.52, abs=0.01)
    assert KINDS["nvlink3"].marketed == "600 GB/s, both directions"
    assert [KINDS[f"nvlink{g}"].rate for g in (2, 3, 4, 5)] == [150e9, 300e9, 450e9, 900e9]
    assert KINDS["net100g"].rate == 12.5e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nvlnk3", "did you mean 'nvlink3'"),
        ("pcie-4", "did you mean 'pcie4'"),
        ("", "no link was named"),
        ("nvlink3x2", "nothing joins the rest"),
        ("nvlink3+net100g", "how many ranks does nvlink3 join"),
        ("nvlink3x1+net100g", "how many ranks"),
        ("nvlink3x4+pcie4x6+net100g", "cannot be made of domains of 4"),
        ("nvlink3:scale=fast", "a positive number"),
        ("nvlink3:scale=-1", "a positive number"),
        ("nvlink3:scale=nan", "a positive number"),
        ("nvlink3:speed=3", "scale=NUMBER"),
        ("nvlink3@", "name no GPU"),
        ("0GB/s", "cannot be"),
        ("1.2.3GB/s", "is not a bandwidth"),
        ("nvlink3x2++net100g", "empty part"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        Links.parse(text)
    assert said in str(caught.value)


def test_domains_must_be_filled() -> None:
    with pytest.raises(OptionError, match="do not fill domains of 4"):
        Links.parse("nvlink3x4+net100g").check(6)
    with pytest.raises(OptionError, match="up to 64 ranks"):
        Links.parse("nvlink3").check(128)
    Links.parse("nvlink3x4+net100g").check(8)


def test_shares_of_a_ring() -> None:
    assert ring_share("all-reduce", 4) == 1.5
    assert ring_share("all-gather", 4) == 0.75
    assert ring_share("send", 2) == 1.0
    assert ring_share("barrier", 4) == 0.0
    assert (ring_hops("all-reduce", 4), ring_hops("reduce-scatter", 4), ring_hops("send", 2)) == (
        6, 3, 1,
    )  # fmt: skip


def test_seconds_by_hand() -> None:
    links = Links.parse("12GB/sx2+3GB/s:scale=10")
    # 1.2 GB/s here inside a pair: half of 24 MB out and half back.
    assert links.seconds("all-reduce", 24e6, (0, 1), 4) == pytest.approx(0.02)
    assert links.seconds("all-reduce", 24e6, (1, 2), 4) == pytest.approx(0.08)
    assert links.seconds("send", 3e6, (0, 3), 4) == pytest.approx(0.01)
    assert links.seconds("all-reduce", 24e6, (1,), 4) == 0.0
    slow = Links.parse("nvlink3:scale=1000")
    wanted = 2 * 1e-6 * 1000 + 1e6 / (300e9 * 0.8 / 1000)
    assert slow.seconds("all-reduce", 1e6, (0, 1), 2) == pytest.approx(wanted)


def test_without_a_switch_a_pair_has_one_of_seven_shares() -> None:
    switched, spread = Links.parse("nvlink2"), Links.parse("nvlink2-mesh")
    assert switched.traffic("all-reduce", 1e6, (0, 1), 8).rate == 150e9 * 0.8
    pair = spread.traffic("all-reduce", 1e6, (0, 1), 8).rate
    assert pair == pytest.approx(150e9 * 0.9 / 7)  # 19.3 GB/s; 22.5 was measured on a V100 pair
    assert spread.traffic("all-reduce", 1e6, range(8), 8).rate == pytest.approx(135e9)


def test_a_domain_shares_its_way_out() -> None:
    links = Links.parse("nvlink3x2+net100g")
    inside = links.traffic("all-reduce", 1.0, (0, 1), 4)
    assert inside.ports == (0, 1, 2, 3)
    first = links.traffic("all-reduce", 1.0, (0, 2), 4)
    second = links.traffic("all-reduce", 1.0, (1, 3), 4)
    assert first.tier == 1
    assert first.ports == second.ports == (8, 9, 10, 11)
    assert links.traffic("send", 1.0, (3, 0), 4).ports == (10, 9)
    assert len(links.ports(4)) == 12
