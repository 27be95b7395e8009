"""The gang on two hosts with real engines, links and power: what ends it, who is named, and that it forms again.

The faults are those of scripts/faults, on its small engine (a gloo group of two without a model) but where said.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest
from faults_lib.faults import FAULTS, plug
from faults_lib.gang_on_rig import GangOnRig
from faults_lib.series import left_behind, run
from faults_lib.soak import clients
from rig_hosts import Rig
from rig_lib import network

IN_CI = ("kill -9 of rank 1's worker", "SIGSTOP of rank 0's worker", "link of node2 down for 5 s")
OTHERS = [fault.name for fault in FAULTS if "small" in fault.engines and fault.name not in IN_CI]


@pytest.fixture(scope="module")
def gang(rig: Rig) -> Iterator[GangOnRig]:
    """Two ranks that serve; nothing of them is left at the end."""
    made = GangOnRig("small")
    made.up()
    yield made
    assert made.down().returncode == 0
    assert left_behind(made) == []


@pytest.mark.parametrize("name", IN_CI)
def test_the_gang_ends_as_it_should_and_forms_again(gang: GangOnRig, name: str) -> None:
    outcome = run(gang, next(fault for fault in FAULTS if fault.name == name))
    assert outcome.held and outcome.named_right in (True, None), outcome


def test_every_rank_tells_the_truth_about_its_health(gang: GangOnRig) -> None:
    def health(rank: int) -> tuple[bool, str]:
        argv = ["docker", "exec", gang.container(rank), "python3", "-m", "exl3_vllm.rank", "--health"]
        said = gang.inside(gang.host_of(rank), *argv, check=False)
        return said == "healthy\n", said

    if not gang.is_serving(0):
        gang.up()
    assert [health(rank)[0] for rank in (0, 1)] == [True, True]
    # given a headless rank whose head is gone, then it is not healthy, and says for whom it waits
    gang.inside("node1", "docker", "stop", gang.container(0))
    deadline = time.monotonic() + 60
    while "waits for rank 0" not in health(1)[1]:
        assert time.monotonic() < deadline, health(1)
        time.sleep(0.5)
    gang.inside("node1", "docker", "start", gang.container(0))
    gang.wait_serving(0)
    assert [health(rank)[0] for rank in (0, 1)] == [True, True]


def test_the_secret_is_seen_by_nobody(gang: GangOnRig) -> None:
    secret = gang.inside("node1", "cat", "/root/.cache/exl3kit/deployments/demo-tp2/gang_secret")
    assert len(secret) == 64
    mode = gang.inside("node1", "stat", "-c", "%a %u", "/root/.cache/exl3kit/deployments/demo-tp2/gang_secret")
    assert mode == "400 10001\n"
    for rank, name in ((0, "node1"), (1, "node2")):
        for argv in (["docker", "inspect", gang.container(rank)], ["docker", "logs", gang.container(rank)]):
            assert secret not in gang.inside(name, *argv)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [fault.name for fault in FAULTS if "small" in fault.engines and fault.name not in IN_CI]
)
def test_every_other_fault(gang: GangOnRig, name: str) -> None:
    outcome = run(gang, next(fault for fault in FAULTS if fault.name == name))
    assert outcome.held and outcome.named_right in (True, None), outcome


@pytest.mark.full
def test_one_node_late_by_minutes_is_waited_for(gang: GangOnRig) -> None:
    if not gang.is_serving(0):
        gang.up()
    incarnation = gang.incarnation()
    network.link_down(gang.nodes["node2"])
    try:
        time.sleep(150)
        status = gang.status(0)
        assert status["state"] == "waiting"
        assert status["waiting_for"][0]["rank"] == 1
        looked = json.loads(gang.inside("node1", "docker", "inspect", gang.container(0)))[0]
        assert looked["State"]["Running"] and looked["RestartCount"] <= 3  # it waits, it does not start over and over
    finally:
        plug(gang)
    gang.wait_serving(incarnation)


@pytest.mark.full
def test_requests_in_flight_are_answered_when_a_rank_is_told_to_stop(gang: GangOnRig) -> None:
    if not gang.is_serving(0):
        gang.up()
    going = [gang.client("2+2=", 300, 60) for _ in range(3)]
    time.sleep(0.5)
    gang.process(1, "supervisor")  # rank 1, which holds no request, is the one that is told
    gang.kill(1, "guard", signal.SIGTERM)
    assert [one.communicate(timeout=60)[0].strip() for one in going] == ["200"] * 3
    gang.wait_serving(gang.incarnation())


@pytest.mark.full
def test_many_clients_see_no_error(gang: GangOnRig) -> None:
    if not gang.is_serving(0):
        gang.up()
    told = json.loads(clients(gang, 64, 20).communicate(timeout=120)[0])
    assert told["errors"] == {} and told["requests"] > 64
