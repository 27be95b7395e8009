"""The pure parts of serving: facts, ports, receipts and states from what machines say."""

from __future__ import annotations

from typing import Any

import pytest

from exl3kit import facts, ports, receipts, serve, status
from exl3kit.probe import Engine

ANSWER = """machine 1b2c
kernel 6.14.0-1015-nvidia
cpus 0-2,5
uid 1000
gid 1001
cache /home/op/.cache/exl3kit
hub /home/op/.cache/huggingface/hub
own_name 127.0.1.1
meminfo MemTotal:       1000 kB
meminfo MemFree:         100 kB
meminfo MemAvailable:    900 kB
meminfo Cached:          700 kB
meminfo SwapTotal:         0 kB
meminfo SwapFree:          0 kB
link lo 65536 carrier:1 speed: wired
link enp1s0f0np0 9000 carrier:1 speed:200000 wired
clock 1767225600.5
interface lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever
interface enp1s0f0np0    inet 10.0.0.1/24 brd 10.0.0.255 scope global enp1s0f0np0\\       valid_lft forever
"""


ENGINE = Engine("E", "28.3.3", "/var/lib/docker", ("nvidia", "runc"), True)


def test_facts_are_read_from_the_answer_of_a_node() -> None:
    node = facts.parse("spark1", "10.0.0.1", ANSWER, ENGINE)
    assert (node.interface, node.own_name, node.cpus) == ("enp1s0f0np0", ("127.0.1.1",), (0, 1, 2, 5))
    assert (node.uid, node.gid, node.cache) == (1000, 1001, "/home/op/.cache/exl3kit")


def test_an_address_that_no_interface_has_is_not_guessed() -> None:
    assert facts.parse("spark1", "192.0.2.1", ANSWER, ENGINE).interface is None


def test_a_missing_fact_is_an_error_and_no_default() -> None:
    with pytest.raises(KeyError):
        facts.parse("spark1", "10.0.0.1", ANSWER.replace("cpus", "cores"), ENGINE)
    with pytest.raises(ValueError, match="invalid literal"):
        facts.parse("spark1", "10.0.0.1", ANSWER.replace("0-2,5", ""), ENGINE)


PROC = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   1: 0100007F:1F41 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000
"""


def test_only_listening_ports_are_taken() -> None:
    assert ports.parse(PROC) == {8000, 22}


def receipt(rank: int, **changes: Any) -> dict[str, Any]:
    fields = {"rank": rank, "node": f"n{rank}", "fingerprint": "f" * 64, "trellis_tensors": 15, "trellis_bytes": 300}
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([receipt(0), receipt(1)], None),
        ([receipt(0, trellis_bytes=400), receipt(1)], None),  # a replicated tensor counts on both
        ([receipt(0)], "receipts of 2 ranks were expected"),
        ([receipt(0), receipt(0)], "receipts of 2 ranks were expected"),
        ([], "none came"),
        (
            [receipt(0), receipt(1, fingerprint="e" * 64)],
            "different checkpoints (rank 0 on n0: ffffffffffff, rank 1 on n1",
        ),
        ([receipt(0), receipt(1, trellis_tensors=0)], "rank 1 loaded no EXL3 tensor"),
        ([receipt(0), receipt(1, trellis_bytes=299)], "hold 599 bytes of trellis together, and the checkpoint has 600"),
    ],
)
def test_receipts_that_do_not_add_up_are_refused(given: list[dict[str, Any]], problem: str | None) -> None:
    found = receipts.find_problem(given, world=2, trellis_bytes=600)
    assert found == problem if problem is None else problem in str(found)


def rank(
    state: str = "running", unhealthy: str | None = None, generation: str = "g1", fingerprint: str = "f"
) -> dict[str, Any]:
    receipts_of_it = [{"fingerprint": fingerprint}] if state == "running" else []
    return {"state": state, "unhealthy": unhealthy, "generation": generation, "receipts": receipts_of_it}


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([rank(), rank()], "serving"),
        ([rank(), rank(unhealthy="no receipt yet")], "starting"),
        ([rank(), rank("exited", "it ended")], "partial"),
        ([rank()], "partial"),
        ([rank(), rank(fingerprint="e")], "mismatch"),
        ([rank(), rank(generation="g2")], "partial"),
        ([rank("exited", "it ended"), rank("created", "it never ran")], "stopped"),
    ],
)
def test_the_state_of_a_deployment_in_one_word(ranks: list[dict[str, Any]], word: str) -> None:
    assert status.state(ranks, expected=2) == word


def test_later_generations_sort_later() -> None:
    first = serve.new_generation()
    assert first < serve.new_generation()
