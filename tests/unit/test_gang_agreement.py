"""The gang's agreement as a pure machine: who may start with whom, what ends it, under lost, late and doubled beats."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay"))

from exl3_vllm.gang import FRESH_S, Beat, Gang, Identity, Phase

BEAT_S = 0.5
DEATH = {"kind": "exit", "sentence": "it ended"}


class Net:
    """Ranks on one clock whose beats arrive as `fate` says: None is lost, else the seconds until it arrives."""

    def __init__(self, *gangs: Gang, fate: Callable[[Beat], list[float]] = lambda beat: [0.0]) -> None:
        self.gangs = list(gangs)
        self.fate = fate
        self.now = 100.0
        self.under_way: list[tuple[float, int, Beat]] = []
        self.recorded: list[tuple[int, Beat]] = []  # what went to which rank

    def run(self, seconds: float) -> Net:
        for _ in range(round(seconds / BEAT_S)):
            self.step()
        return self

    def step(self) -> None:
        self.now += BEAT_S
        for gang in self.gangs:
            for rank in gang.peers:
                beat = gang.beat_to(rank, self.now)
                self.recorded.append((rank, beat))
                self.under_way += [(self.now + late, rank, beat) for late in self.fate(beat)]
        due = [one for one in self.under_way if one[0] <= self.now]
        self.under_way = [one for one in self.under_way if one[0] > self.now]
        for _, rank, beat in due:
            self.gangs[rank].hear(beat, self.now)
        for gang in self.gangs:
            gang.tick(self.now)

    def replace(self, rank: int, gang: Gang) -> None:
        self.gangs[rank] = gang


def gang(rank: int, world: int = 2, session: str = "", known: int = 0, **changes: Any) -> Gang:
    me = Identity(rank, world, "g1", "spec", session or f"session of {rank}")
    return Gang(replace(me, **changes), known=known)


def phases(net: Net) -> list[str]:
    return [str(one.phase) for one in net.gangs]


def running(world: int = 2) -> Net:
    net = Net(*(gang(rank, world) for rank in range(world))).run(5)
    assert phases(net) == ["running"] * world
    return net


def test_all_ranks_agree_on_one_incarnation() -> None:
    net = running(world=4)
    assert {one.incarnation for one in net.gangs} == {1}
    assert all(one.loss is None for one in net.run(60).gangs)


def test_a_gang_of_one_needs_nobody() -> None:
    net = Net(gang(0, 1)).run(1)
    assert (phases(net), net.gangs[0].incarnation) == (["running"], 1)


def test_nothing_starts_before_the_last_rank_is_there_and_each_says_for_whom_it_waits() -> None:
    net = Net(gang(0, 3), gang(1, 3), gang(2, 3), fate=lambda beat: [] if beat.sender == 2 else [0.0]).run(600)
    assert phases(net) == ["waiting"] * 3
    assert net.gangs[0].waiting_for(net.now) == [{"rank": 2, "why": "was not heard yet"}]
    assert {"rank": 0, "why": "waits: rank 2 was not heard yet"} in net.gangs[1].waiting_for(net.now)
    net.fate = lambda beat: [0.0]
    assert phases(net.run(5)) == ["running"] * 3


def test_numbers_only_rise_whoever_lost_its_memory() -> None:
    net = Net(gang(0, known=0), gang(1, known=41)).run(5)
    assert [one.incarnation for one in net.gangs] == [42, 42]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"generation": "g0"}, "is of generation g0, this rank of g1"),
        ({"spec": "other"}, "is of spec other, this rank of spec"),
    ],
)
def test_a_rank_of_another_deployment_never_joins(changes: dict[str, str], why: str) -> None:
    net = Net(gang(0), gang(1, **changes)).run(30)
    assert phases(net) == ["waiting", "waiting"]
    assert net.gangs[0].waiting_for(net.now) == [{"rank": 1, "why": why}]


def test_a_stale_rank_of_an_incarnation_cannot_join_the_next() -> None:
    # given a gang whose rank 1 was cut off, and replaced in incarnation 2
    net = running()
    stale = net.gangs[1]
    net.replace(1, gang(1, session="new"))
    net.run(4)
    assert net.gangs[0].loss is not None and net.gangs[0].loss.kind == "replaced"
    net.replace(0, gang(0, session="head anew", known=1))
    net.run(5)
    assert [one.incarnation for one in net.gangs] == [2, 2]
    # when the old one comes back and speaks
    for _ in range(20):
        net.step()
        net.gangs[0].hear(stale.beat_to(0, net.now), net.now)
        stale.hear(net.gangs[0].beat_to(1, net.now), net.now)
        stale.tick(net.now)
    # then the gang of 2 does not mind it, and it has lost its own
    assert phases(net) == ["running", "running"]
    assert all(one.loss is None for one in net.gangs)
    assert stale.loss is not None and stale.incarnation == 1


def test_recorded_beats_of_an_older_gang_stand_for_nobody() -> None:
    net = running()
    recorded = [beat for rank, beat in net.recorded if rank == 0]
    head = gang(0, session="head anew", known=1)
    for beat in recorded * 3:
        net.now += 0.1
        head.hear(beat, net.now)
        head.tick(net.now)
    assert head.phase == Phase.WAITING
    assert head.waiting_for(net.now)[0]["why"] == "is heard, and does not hear this rank"


def test_a_doubled_beat_is_no_sign_of_life() -> None:
    net = running()
    last = next(beat for rank, beat in reversed(net.recorded) if rank == 0)
    for _ in range(20):
        net.now += BEAT_S
        net.gangs[0].hear(last, net.now)
        net.gangs[0].tick(net.now)
    loss = net.gangs[0].loss
    assert loss is not None and loss.kind == "silent"


@pytest.mark.parametrize(("seconds", "lost"), [(5.0, False), (7.0, False), (9.0, True)])
def test_a_link_that_is_gone_for_five_seconds_is_ridden_out(seconds: float, lost: bool) -> None:
    net = running()
    net.fate = lambda beat: []
    net.run(seconds)
    net.fate = lambda beat: [0.0]
    net.run(2)
    assert [one.loss is not None for one in net.gangs] == [lost, lost]


def test_a_death_reaches_every_rank_with_its_record() -> None:
    net = running(world=3)
    net.gangs[2].end(DEATH)
    net.run(1)
    for one in net.gangs[:2]:
        assert one.loss is not None and (one.loss.rank, one.loss.kind) == (2, "ended")
        assert one.deaths == {2: DEATH}
    for rank in (0, 1):
        net.gangs[rank].end({"kind": "ended"})
    assert not net.gangs[2].is_settled(net.now)
    net.run(2)
    assert all(one.is_settled(net.now) and sorted(one.deaths) == [0, 1, 2] for one in net.gangs)


def test_a_stop_reaches_the_others_and_is_no_loss() -> None:
    net = running()
    net.gangs[1].stop("it was told to stop")
    net.run(1)
    assert (net.gangs[0].stop_asked_by, net.gangs[0].loss) == (1, None)


def test_a_closed_port_is_believed_after_a_second_without_a_beat() -> None:
    net = running()
    head = net.gangs[0]
    for _ in range(4):
        net.now += BEAT_S
        head.hear_refusal(1, net.now)
        head.tick(net.now)
    assert head.loss is not None and head.loss.kind == "gone"


def test_who_comes_back_in_a_members_place_is_not_the_member_heard_again() -> None:
    # given a rank 1 that is gone, and whose machine starts another at once, while rank 0 tells how it ended itself
    net = running()
    last = net.now
    assert net.gangs[0].last_heard() == {1: last}
    net.replace(1, gang(1, session="again"))
    net.gangs[0].end(DEATH)
    # when the new one is heard
    net.run(FRESH_S + 2)
    assert net.gangs[0].peers[1].live_at == net.now
    # then the member was heard last before
    assert net.gangs[0].last_heard() == {1: last}


def test_a_rank_that_backs_off_is_waited_for_and_named() -> None:
    net = Net(gang(0), gang(1))
    net.gangs[1].back_off("3 failed starts")
    net.run(10)
    assert net.gangs[0].waiting_for(net.now) == [{"rank": 1, "why": "is backing-off: 3 failed starts"}]
    net.gangs[1].be_ready()
    assert phases(net.run(5)) == ["running", "running"]


def test_the_clocks_of_two_machines_are_compared() -> None:
    net = running()

    def shifted(beat: Beat) -> Beat:
        return replace(beat, sent=beat.sent + 1000.0)

    head, other = gang(0), gang(1)
    now = 50.0
    for _ in range(12):
        now += BEAT_S
        head.hear(shifted(other.beat_to(0, now)), now + 0.01)
        other.hear(head.beat_to(1, now), now + 1000.01)
    assert abs(head.offset(1) + 1000.0) < 0.1
    assert net.gangs[0].offset(1) == 0.0


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.6), world=st.integers(2, 4), restarts=st.integers(0, 6))
def test_whatever_the_network_does_no_two_ranks_run_in_different_members_of_one_incarnation(
    seed: int, loss: float, world: int, restarts: int
) -> None:
    """Lost, doubled and late beats, ranks that start anew at any time: who runs in an incarnation is one set."""
    dice = random.Random(seed)

    def fate(beat: Beat) -> list[float]:
        if dice.random() < loss:
            return []
        return [dice.choice([0.0, 0.0, 0.5, 1.0, 4.0]) for _ in range(dice.choice([1, 1, 1, 2]))]

    net = Net(*(gang(rank, world) for rank in range(world)), fate=fate)
    ran: dict[int, set[tuple[tuple[int, str], ...]]] = {}
    moments = sorted(dice.randrange(200) for _ in range(restarts))
    for step in range(200):
        for _ in range(moments.count(step)):
            rank = dice.randrange(world)
            net.replace(
                rank, gang(rank, world, session=f"{rank} at {step} {dice.random()}", known=net.gangs[rank].known)
            )
        net.step()
        for rank, one in enumerate(net.gangs):
            if one.phase == Phase.RUNNING:
                ran.setdefault(one.incarnation, set()).add(tuple(sorted(one.members.items())))
                assert one.members[rank] == one.me.session
            if one.loss is not None:  # its supervisor ends it, and its container starts anew
                net.replace(rank, gang(rank, world, session=f"{rank} after {step} {dice.random()}", known=one.known))
    assert all(len(members) == 1 for members in ran.values())
    # and once the network is good, the gang forms
    net.fate = lambda beat: [0.0]
    for _ in range(60):
        net.step()
        for rank, one in enumerate(net.gangs):
            if one.loss is not None:
                net.replace(rank, gang(rank, world, session=f"{rank} mended {dice.random()}", known=one.known))
    assert {one.phase for one in net.gangs} == {Phase.RUNNING}
    assert len({one.incarnation for one in net.gangs}) == 1


def test_fresh_is_shorter_than_lost() -> None:
    """Given two beats a second, a rank that missed three of them is not joined and not yet lost."""
    assert BEAT_S * 3 < FRESH_S < gang(0).lost_s
