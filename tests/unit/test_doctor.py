"""The doctor's checks: what each fault of a node is called, how bad it is, and what is said to do about it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from spark_nodes import ENGINE, Spark, place

from exl3kit import checks, doctor
from exl3kit.checks import Finding, Need, Reached, Standing
from exl3kit.cli import doctor as shown
from exl3kit.errors import ExitCode, KitError

NEED = Need(
    deployment="glm",
    gpu=True,
    capabilities=("12.1",),
    cuda="13.0",
    several=True,
    rdma=True,
    ports={"spark1": (8888, 18888)},
)


def findings(spark: Spark, need: Need = NEED, standing: tuple[Standing, ...] = ()) -> list[Finding]:
    return checks.examine([replace(place(spark), standing=standing)], need)


def test_nothing_speaks_against_a_spark_as_it_should_be() -> None:
    found = findings(Spark())
    assert [one for one in found if one.level != "ok"] == []
    said = {one.check: one.says for one in found}
    assert said["GPU"] == "NVIDIA GB10 (12.1), driver 580.95.05, CUDA up to 13.0"
    assert said["RDMA"] == (
        "rocep1s0f0:1 on enp1s0f0np0 10.0.0.1/24 GID 3, roceP2p1s0f0:1 on enP2p1s0f0np0 10.0.1.1/24 GID 3"
    )
    assert said["fabric"] == "enp1s0f0np0 10.0.0.1, 200 Gb/s, MTU 9000"
    assert said["ports"] == "free: 8888, 18888"


@pytest.mark.parametrize(
    ("change", "check", "level", "says", "fix"),
    [
        ({"gpu": False}, "GPU", "refuse", "there is no nvidia-smi", "driver"),
        ({"capability": "12.0"}, "GPU code", "refuse", "no kernel would start", '"12.0"'),
        ({"capability": "12.3"}, "GPU code", "warn", "code for 12.1 should run", '"12.3"'),
        ({"cuda": "12.8"}, "driver", "refuse", "CUDA up to 12.8, the image is of 13.0", "newer NVIDIA driver"),
        ({"driver": "590.44.01", "cdi_driver": "590.44.01"}, "driver", "warn", "capture that never ends", "580"),
        ({"kernel": "6.17.0-1008-nvidia"}, "kernel", "warn", "panics were reported", "another kernel"),
        ({"cdi_driver": "580.65.06"}, "GPU access", "warn", "is of driver 580.65.06", "nvidia-ctk cdi generate"),
        (
            {"engine": replace(ENGINE, runtimes=("runc",)), "cdi_driver": "580.65.06"},
            "GPU access", "refuse", "its files are gone", "nvidia-ctk cdi generate",
        ),
        (
            {"engine": replace(ENGINE, runtimes=("runc",), cdi=False)},
            "GPU access", "refuse", "the engine reads no CDI", "daemon.json",
        ),
        ({"carrier": False}, "fabric", "refuse", "enp1s0f0np0 has no carrier", "plug"),
        ({"mtu": 1500}, "fabric", "warn", "MTU 1500", "mtu 9000"),
        ({"wireless": True}, "fabric", "warn", "Wi-Fi", "cable"),
        ({"active": False}, "RDMA", "refuse", "is not active", "plug"),
        ({"adapters": False}, "RDMA", "refuse", "no RDMA adapter", "rdma-core"),
        ({"twin_address": False}, "RDMA", "warn", "half of the cable's rate", "address of a network of its own"),
        ({"listeners": ((8888, "vllm"),)}, "ports", "refuse", "in use by vllm (process 4711)", "serve.port"),
        ({"swap_kib": 16_000_000}, "memory", "warn", "swap is on", "swapoff"),
        ({"earlyoom": False}, "memory", "warn", "locks up", "earlyoom"),
        ({"free_bytes": 4_000_000_000}, "disk", "warn", "4.0 of 4000.0 GB free", "prune"),
        ({"disk_bytes": 2_700_000_000, "free_bytes": 2_600_000_000}, "disk", "warn", "of 2.7 GB free", "a larger disk"),
    ],
)  # fmt: skip
def test_each_fault_of_a_node_is_named_with_its_fix(
    change: dict[str, Any], check: str, level: str, says: str, fix: str
) -> None:
    found = [one for one in findings(replace(Spark(), **change)) if one.check == check and one.level == level]
    assert any(says in one.says and fix in str(one.fix) for one in found), found


def test_case_12_an_interface_of_another_node_is_never_taken() -> None:
    """Given a node whose adapters have other names, then those are found; given its address on none, it is refused."""
    spark = Spark(link="enp9s0", twin="enp8s0")
    said = {one.check: one for one in findings(spark)}
    assert said["fabric"].says.startswith("enp9s0 10.0.0.1") and "on enp9s0" in said["RDMA"].says
    elsewhere = replace(place(Spark()), address="192.168.77.1")
    refused = [one for one in checks.examine([elsewhere], NEED) if one.level == "refuse"]
    assert "192.168.77.1 is on none of its interfaces (enP2p1s0f0np0 10.0.1.1/24" in refused[0].says


def test_case_13_a_gid_table_without_the_address_is_refused() -> None:
    here = place(Spark())
    emptied = tuple(replace(hca, gids=tuple(gid for gid in hca.gids if gid.address is None)) for hca in here.probe.hcas)
    found = checks.examine([replace(here, probe=replace(here.probe, hcas=emptied))], NEED)
    refused = [one for one in found if one.level == "refuse"]
    assert "no RoCE v2 GID of rocep1s0f0 maps to 10.0.0.1 (0: link-local IB/RoCE v1, 1: link-local" in refused[0].says
    assert "link set enp1s0f0np0" in str(refused[0].fix)


def test_case_17_a_port_of_another_deployment_is_named_and_the_own_one_makes_way() -> None:
    taken = Spark(listeners=((8888, "docker-proxy"),))
    other = Standing("c", "qwen", 0, 1, "g", True, (8888,))
    (refused,) = [one for one in findings(taken, standing=(other,)) if one.level == "refuse"]
    assert (refused.says, refused.fix) == ("port 8888 is in use by deployment qwen", "`kit down qwen`")
    own = replace(other, deployment="glm")
    assert not [one for one in findings(taken, standing=(own,)) if one.level == "refuse"]


def test_leftovers_of_older_gangs_are_told() -> None:
    left = (Standing("c", "old", 1, 2, "g", True), Standing("d", "dead", 0, 1, "g", False))
    told = [one for one in findings(Spark(), standing=left) if one.check == "leftovers"]
    assert [(one.level, one.says) for one in told] == [
        ("ok", "deployment dead: stopped"),
        ("warn", "deployment old: 1 of its 2 ranks run here, without a health check"),
    ]


@pytest.mark.parametrize(
    ("ranks", "check", "level", "says"),
    [
        # (rank, of how many, generation, running, health)
        ([(0, 2, "g", True, "healthy"), (1, 2, "g", True, "healthy")], "deployments", "ok", "2 of its 2 ranks run"),
        ([(1, 2, "g", True, "healthy")], "deployments", "ok", "1 of its 2 ranks run"),  # the other one elsewhere
        ([(0, 2, "g", True, "starting"), (1, 2, "g", True, "starting")], "deployments", "ok", "run here, starting"),
        ([(1, 2, "g", True, "starting")], "leftovers", "warn", "1 of its 2 ranks run here, starting"),
        ([(0, 2, "g", True, "healthy"), (1, 2, "h", True, "healthy")], "leftovers", "warn", ", of several generations"),
        ([(0, 2, "g", True, "healthy"), (1, 2, "g", False, None)], "leftovers", "warn", "1 of its 2 ranks run"),
        ([(0, 1, "g", True, "unhealthy")], "leftovers", "warn", "1 of its 1 ranks run here, unhealthy"),
    ],
)  # fmt: skip
def test_a_deployment_that_serves_is_no_leftover(
    ranks: list[tuple[int, int, str, bool, str | None]], check: str, level: str, says: str
) -> None:
    standing = tuple(Standing(f"c{one[0]}", "other", *one[:4], (), one[4]) for one in ranks)
    for need in (NEED, Need()):
        found = [one for one in findings(Spark(), need, standing) if "deployment other" in one.says]
        assert [(one.check, one.level) for one in found] == [(check, level)] and says in found[0].says
        assert (found[0].fix == "`kit down other`") is (level == "warn")


@pytest.mark.parametrize(("skew", "level"), [(0.4, "ok"), (-90.0, "warn"), (2.4, "ok"), (3.0, "warn")])
def test_clocks_that_differ_by_more_than_two_seconds_and_the_error_are_told(skew: float, level: str) -> None:
    here = place(Spark())
    probe = replace(here.probe, skew=skew, skew_error=0.5)
    (found,) = checks.clock(replace(here, probe=probe), NEED)
    assert found.level == level


def test_nodes_that_differ_are_told() -> None:
    places = [place(Spark()), place(Spark(number=2, mtu=1500, speed=100_000))]
    across = [one for one in checks.examine(places, NEED) if one.node == "spark1-spark2"]
    assert [one.says for one in across] == [
        "the MTU differs: spark1 9000, spark2 1500",
        "the speed differs: spark1 200000, spark2 100000",
    ]


@pytest.mark.parametrize(
    ("rate", "fault", "level", "says"),
    [
        (4e9, None, "ok", "32.0 Gb/s"),
        (1e8, None, "warn", "0.8 Gb/s, of a link of 200 Gb/s"),
        (None, "10.0.0.2: Connection refused", "refuse", "Connection refused"),
        (None, "not measured: spark2 has no perl", "warn", "no perl"),
    ],
)
def test_what_was_sent_between_nodes_is_judged(rate: float | None, fault: str | None, level: str, says: str) -> None:
    places = {f"spark{n}": place(Spark(number=n)) for n in (1, 2)}
    (found,) = checks.reach([Reached("spark1", "spark2", rate, fault)], places, NEED)
    assert (found.level, says in found.says) == (level, True)


def test_case_18_a_node_that_cannot_be_opened_is_a_finding_with_its_sentence() -> None:
    error = KitError("ssh has no key that the node accepts", where="node spark2", why="Permission denied",
                     next_step="`ssh-copy-id spark2`", code=ExitCode.UNREACHABLE)  # fmt: skip
    report = doctor.examine([], [error], None, bandwidth=False)
    (one,) = report.refused
    assert (one.node, one.fix) == ("spark2", "`ssh-copy-id spark2`")
    assert "Permission denied" in one.says


def test_all_refusals_are_in_one_error() -> None:
    with pytest.raises(KitError) as refused:
        doctor.refuse([Finding("a", "ports", "refuse", "port 1 is in use", "stop it"),
                       Finding("b", "GPU", "refuse", "no GPU")])  # fmt: skip
    error = json.dumps(refused.value.as_json())
    assert refused.value.code == ExitCode.PREFLIGHT and "port 1" in error and "node b: GPU: no GPU" in error


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        (["ok", "ok"], "nothing speaks against serving"),
        (["ok", "warn"], "nothing is refused, 1 warning"),
        (["refuse", "warn", "ok", "warn"], "refused: 1 of 4 checks, 2 warnings"),
        (["refuse", "refuse"], "refused: 2 of 2 checks"),
    ],
)
def test_the_report_ends_with_what_it_comes_to(
    levels: list[Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown.show(doctor.Report([Finding("node1", "clock", level, "a thing", "a way out") for level in levels], {}))
    assert capsys.readouterr().out.splitlines()[-1] == says
