"""Clusters as people type them: what comes out, and what is refused and how."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster.describe.changes import SETTINGS
from shardwise.cluster.describe.read import read_cluster
from shardwise.cluster.describe.table import known_devices
from shardwise.cluster.describe.toml import write_toml
from shardwise.errors import Exit, UserError


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "kind"),
    [
        ("h100", 1, 1, "h100"),
        ("8xh100", 1, 8, "h100"),
        ("4x8xh100", 4, 8, "h100"),
        ("2x8xA100", 2, 8, "a100-80"),
        ("4x8xH100_SXM", 4, 8, "h100"),
        ("2 x 4090", 1, 2, "rtx4090"),
        ("18x4xgb200", 18, 4, "gb200"),
    ],
)
def test_shorthand(text, nodes, per_node, kind):
    cluster = read_cluster(text)
    assert (cluster.nodes, cluster.per_node, cluster.device.name) == (nodes, per_node, kind)


@pytest.mark.parametrize("kind", known_devices())
def test_every_kind_is_complete_and_says_where_its_numbers_are_from(kind):
    cluster = read_cluster(f"4x4x{kind}")
    device = cluster.device
    assert device.memory > 2**30 and device.bandwidth > 0 and device.units >= 1 and device.watts > 0
    assert all(rate > 0 for rate in device.flops.values()) and 0 < device.achievable <= 1
    for name in ("memory", "flops", "achievable", "bandwidth", "host", "link", "nic", "launch"):
        assert cluster.origins[name]
    assert cluster.price is None  # prices are not in data sheets
    assert hash(cluster) == hash(read_cluster(f"4x4x{kind}"))


def test_tiers_go_from_the_fast_link_to_the_spine():
    assert [(link.name, link.span) for link in read_cluster("8xh100").tiers] == [("nvlink", 8)]
    assert [(link.name, link.span) for link in read_cluster("4x8xh100").tiers] == [("nvlink", 8), ("nic", 32)]
    fast, nic, spine = read_cluster("64x8xh100:pod=256,oversubscription=4").tiers
    assert (fast.span, nic.span, spine.span) == (8, 256, 512)
    assert spine.bandwidth == nic.bandwidth / 4 == 12.5e9


def test_a_rack_of_72_is_one_domain_over_many_machines():
    assert [link.span for link in read_cluster("18x4xgb200").tiers] == [72]
    assert [link.span for link in read_cluster("36x4xgb300").tiers] == [72, 144]


def test_settings_replace_the_table_and_say_so():
    cluster = read_cluster("4x8xh100:nic=400Gb/s,memory=80GB,link=300GB/s,nics=4,price=2.5")
    assert cluster.device.memory == 80_000_000_000 and cluster.price == 2.5
    assert cluster.tiers[0].bandwidth == 300e9
    assert cluster.tiers[1].bandwidth == 25e9  # 4 cards of 50 GB/s for 8 devices
    assert {name for name, origin in cluster.origins.items() if origin == "typed"} == {
        "nic",
        "memory",
        "link",
        "nics",
        "price",
    }
    assert cluster.origins["flops"] == "data sheet of h100"


def test_settings_of_a_network_leave_the_others_alone():
    before = read_cluster("64x8xh100:pod=256,oversubscription=4")
    after = read_cluster("64x8xh100:pod=256,oversubscription=4,nic=25GB/s")
    assert [link.span for link in after.tiers] == [link.span for link in before.tiers]
    assert [link.bandwidth for link in after.tiers] == [450e9, 25e9, 6.25e9]


def test_cards_share_the_cpu_memory_of_their_machine():
    assert read_cluster("2xrtx4090:cpu_memory=96GB").host_share == 48 * 10**9
    assert read_cluster("2xrtx4090").host_share == 256 * 10**9


def test_cards_without_peer_access_say_so():
    assert "no peer access" in read_cluster("4xrtx4090").origins["link"]
    assert "no peer access" not in read_cluster("4xl40s").origins["link"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xh10", "did you mean `h100`"),
        ("4x8xh100:nik=50GB/s", "did you mean `nic`"),
        ("0x8xh100", "from 1 to"),
        ("4x0xh100", "from 1 to"),
        ("-4x8xh100", "from 1 to"),
        ("99999999x8xh100", "from 1 to"),
        ("16xh100", "`2x8xh100`"),
        ("4x8xh100:nic=0", "makes sense"),
        ("4x8xh100:nic=-5GB/s", "nic=50GB/s"),
        ("4x8xh100:nic=1e18", "makes sense"),
        ("4x8xh100:nic=50", "50 bytes per second"),
        ("4x8xh100:nic=nan", "nic=50GB/s"),
        ("4x8xh100:nic", "name=value"),
        ("4x8xh100:", "name=value"),
        ("4x8xh100:price=free", "price=2.5"),
        ("4x8xh100:nics=2.5", "whole number"),
        ("", "for example"),
        ("eight h100", "for example"),
        ("nowhere.toml", "cannot read nowhere.toml"),
    ],
)
def test_bad_input(text, said):
    with pytest.raises(UserError) as raised:
        read_cluster(text)
    assert said in str(raised.value) and raised.value.code == Exit.USER_MISTAKE


def _file(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "4x8xh100:price=2",
        "36x4xgb300",
        "2xrtx4090",
        "2xrtx4090:cpu_memory=96GB",
        "64x8xmi300x:pod=64,oversubscription=2",
    ],
)
def test_a_written_cluster_reads_as_itself(text, tmp_path):
    cluster = read_cluster(text)
    assert read_cluster(_file(tmp_path, write_toml(cluster))) == cluster


def test_a_file_of_a_person(tmp_path):
    path = _file(
        tmp_path,
        'nodes = 4\nper_node = 8\ngpu = "h100"\nnic = "400Gb/s"\nprice = 2.5\n'
        '[device]\nachievable = 0.7\nlaunch = "4us"\n'
        'flops = { bf16 = 8e14 }\ncurves = { "matmul/bf16" = [[1e12, 6e14], [1e9, 1e14]] }\n',
    )
    cluster = read_cluster(path)
    assert cluster.device.achievable == 0.7 and cluster.device.flops["bf16"] == 8e14
    assert cluster.device.flops["fp8"] == 1979e12  # the table's
    assert cluster.device.launch == pytest.approx(4e-6)
    assert cluster.device.curves["matmul/bf16"] == ((1e9, 1e14), (1e12, 6e14))
    assert cluster.tiers[1].bandwidth == 50e9 and cluster.price == 2.5
    assert cluster.origins["achievable"] == path and cluster.origins["bandwidth"] == "data sheet of h100"


def test_the_file_in_the_docs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    cluster = read_cluster(_file(tmp_path, page.split("```toml\n")[1].split("```")[0]))
    assert cluster.world == 32 and [link.name for link in cluster.tiers] == ["nvlink", "nic"]
    for text in re.findall(r"^\| `([^`.]+)` \|", page, re.MULTILINE):
        assert text == "this" or read_cluster(text).world >= 1
    assert set(known_devices()) <= set(re.findall(r"[\w-]+", page.split("Kinds:")[1]))
    assert set(SETTINGS) <= set(re.findall(r"`(\w+)`", page))


def test_a_tier_takes_from_the_table_what_it_leaves_out(tmp_path):
    table = read_cluster("4x8xh100").tiers
    head = 'nodes = 4\nper_node = 8\ngpu = "h100"\n'
    fast, nic = read_cluster(
        _file(
            tmp_path, head + '[[tier]]\nname = "nvlink"\nalpha = "1us"\n[[tier]]\nname = "nic"\nbandwidth = "25GB/s"\n'
        )
    ).tiers
    assert fast == replace(table[0], alpha=1e-6)
    assert nic == replace(table[1], bandwidth=25e9, half=table[1].half / 2)


def test_many_machines_like_the_one_in_a_file(tmp_path):
    path = _file(
        tmp_path,
        'nodes = 1\nper_node = 2\n[device]\nname = "own"\nmemory = "10GB"\nbandwidth = "1TB/s"\n'
        "flops = { bf16 = 1e14 }\n"
        '[[tier]]\nname = "pcie"\nbandwidth = "20GB/s"\n',
    )
    assert read_cluster(path).tiers[0].span == 2
    many = read_cluster(f"{path}:nodes=16,nic=10GB/s")
    assert many.world == 32 and [link.span for link in many.tiers] == [2, 32]
    with pytest.raises(UserError, match="network between machines is not known"):
        read_cluster(f"{path}:nodes=16")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = = 3", "is no TOML file"),
        ('gpu = "h100"\nnode = 3', "did you mean `nodes`"),
        ('gpu = "h1000"', "did you mean `h100`"),
        ("gpu = 7", "it is a text"),
        ('gpu = "h100"\nnodes = 0', "from 1 to"),
        ('gpu = "h100"\nnodes = "many"', "cannot be read"),
        ('gpu = "h100"\nnodes = true', "cannot be read"),
        ('gpu = "h100"\nschema = 9', "schema 1"),
        ('gpu = "h100"\n[device]\nmemry = 3', "did you mean `memory`"),
        ('gpu = "h100"\n[device]\nflops = { bf17 = 1e12 }', "did you mean `bf16`"),
        ('gpu = "h100"\n[device]\nflops = 3', "it is a table"),
        ('gpu = "h100"\n[device]\nkind = "tpu"', "cuda or cpu"),
        ('gpu = "h100"\n[device.curves]\n"matmul/bf16" = [[0, 1]]', "above zero"),
        ('gpu = "h100"\n[[tier]]\nspan = 8', "no bandwidth"),
        ('gpu = "h100"\nper_node = 8\n[[tier]]\nspan = 4\nbandwidth = "1GB/s"', "nothing joins all"),
        ('gpu = "h100"\nnic = "1GB/s"\n[[tier]]\nbandwidth = "1GB/s"', "leave out nic"),
        ("nodes = 1", "[device] has no memory"),
        ('[device]\nmemory = "1GB"\nbandwidth = "1GB/s"\nflops = { fp32 = 1e12 }', "no [[tier]]"),
    ],
)
def test_bad_files(text, said, tmp_path):
    with pytest.raises(UserError) as raised:
        read_cluster(_file(tmp_path, text))
    assert said in str(raised.value) and raised.value.code == Exit.USER_MISTAKE
