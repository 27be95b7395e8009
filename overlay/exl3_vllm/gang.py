"""The gang as one rank sees it: who is there, what was agreed, who is lost. Pure: beats and the clock in, state out.

Every rank tells every other its whole state twice a second (a beat), so a beat that is lost, doubled or late costs
nothing. A beat counts only when it echoes the session of the rank that hears it: then it was made after that rank
started, and no recording of an older gang can stand for it.

The head issues incarnation n+1 when all ranks wait; each rank keeps the highest n it ever agreed to and takes no lower
or equal one. The members of an incarnation are sessions, not ranks: a rank that started anew is another member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FRESH_S = 2.0  # a rank that was heard within this time is there
JOIN_S = 5.0  # for all ranks to agree on an incarnation that the head issued
REFUSED_S = 1.0  # a closed port for this long, with no beat between, is a supervisor that is gone
CLOCK_DRIFT = 2e-4  # by which two clocks may part, 10 times what quartz does


class Phase(StrEnum):
    BACKING_OFF = "backing-off"
    WAITING = "waiting"
    JOINING = "joining"  # agreed to an incarnation, not yet started
    RUNNING = "running"  # vLLM was started in it
    STOPPING = "stopping"  # somebody asked for an end
    ENDED = "ended"


BOUND = (Phase.JOINING, Phase.RUNNING, Phase.STOPPING, Phase.ENDED)


@dataclass(frozen=True)
class Identity:
    """Who a rank is. `session` is new at every start of a supervisor."""

    rank: int
    world: int
    generation: str
    spec: str
    session: str


@dataclass(frozen=True)
class Beat:
    """What one rank tells another. `sent` and `lag` are seconds of the sender's own monotonic clock."""

    sender: int
    generation: str
    spec: str
    session: str
    echo: str  # session of the receiver, as far as the sender knows
    seq: int
    sent: float
    lag: float | None  # least (received - sent) of the receiver's beats at the sender, the clocks' difference included
    phase: Phase
    incarnation: int
    known: int  # highest incarnation that the sender ever agreed to
    members: Mapping[int, str] = field(default_factory=dict)  # the head's: sessions of the incarnation, by rank
    serving: bool = False
    note: str = ""
    death: Mapping[str, Any] | None = None  # with phase ENDED
    heard: tuple[int, ...] = ()  # ranks whose death the sender knows


@dataclass(frozen=True)
class Loss:
    """Why a peer is no longer part of the incarnation."""

    rank: int
    kind: str  # ended, replaced, left, silent, gone
    sentence: str


@dataclass
class Peer:
    """What is known of another rank."""

    rank: int
    claimed: str = ""  # the session that we echo
    claimed_at: float = float("-inf")
    live: Beat | None = None  # its newest beat that echoed our session
    live_at: float = float("-inf")
    lag: float | None = None
    seqs: dict[str, int] = field(default_factory=dict)  # by session, as the next
    heard: dict[str, float] = field(default_factory=dict)
    refused_since: float | None = None
    refused_at: float = float("-inf")
    bound_to: int = 0  # the newest incarnation that it was heard to be in
    stranger: str = ""  # why what comes from there cannot be a member
    stranger_at: float = float("-inf")

    def is_fresh(self, now: float, within: float = FRESH_S) -> bool:
        return self.live is not None and now - self.live_at <= within


class Gang:
    """One rank's part in the gang.

    Parameters
    ----------
    me: this rank.
    known: highest incarnation it ever agreed to, from its state folder.
    lost_s: silence of a peer that ends the gang. 8 s: a link gone for 5 s is ridden out, also on a busy machine.
    """

    def __init__(self, me: Identity, *, known: int = 0, lost_s: float = 8.0) -> None:
        self.me = me
        self.known = known
        self.lost_s = lost_s
        self.phase = Phase.WAITING
        self.incarnation = 0
        self.members: dict[int, str] = {}
        self.peers = {rank: Peer(rank) for rank in range(me.world) if rank != me.rank}
        self.loss: Loss | None = None
        self.stop_asked_by: int | None = None
        self.serving = False
        self.note = ""
        self.deaths: dict[int, Mapping[str, Any]] = {}
        self._joined_at = 0.0
        self._seq = 0

    # What comes in ---------------------------------------------------------------------------------------------------

    def hear(self, beat: Beat, now: float) -> None:
        """Take a beat whose sender is proven to know the gang's secret."""
        peer = self.peers.get(beat.sender)
        if peer is None:
            return
        for name, theirs, ours in (
            ("generation", beat.generation, self.me.generation),
            ("spec", beat.spec, self.me.spec),
        ):
            if theirs != ours:
                peer.stranger, peer.stranger_at = f"is of {name} {theirs[:24]}, this rank of {ours[:24]}", now
                return
        held = self.phase in BOUND and self._has_session(peer.live) and peer.is_fresh(now)
        if held and beat.session != self.members[peer.rank]:  # a second one under its name takes no place that is held
            peer.stranger, peer.stranger_at = "is there twice", now
            return
        echoes = beat.echo == self.me.session
        if beat.session == peer.claimed or echoes or now - peer.claimed_at > FRESH_S:
            peer.claimed, peer.claimed_at = beat.session, now
        if not echoes or beat.seq <= peer.seqs.get(beat.session, -1):
            return
        peer.seqs[beat.session], peer.heard[beat.session] = beat.seq, now
        if peer.live is not None and peer.live.session == beat.session and peer.lag is not None:
            peer.lag = min(now - beat.sent, peer.lag + CLOCK_DRIFT * (now - peer.live_at))
        else:
            peer.lag = now - beat.sent
        peer.live, peer.live_at, peer.refused_since = beat, now, None
        if beat.phase in BOUND:
            peer.bound_to = beat.incarnation
        if beat.death is not None and self._is_of_ours(beat):
            self.deaths[beat.sender] = beat.death
        self.tick(now)

    def hear_stranger(self, rank: int, why: str, now: float) -> None:
        """Something came from that rank's address that proves no knowledge of the secret."""
        peer = self.peers[rank]
        peer.stranger, peer.stranger_at = why, now

    def hear_refusal(self, rank: int, now: float) -> None:
        """That rank's machine says that nobody listens on its port."""
        peer = self.peers[rank]
        if peer.refused_since is None or now - peer.refused_at > FRESH_S:
            peer.refused_since = now
        peer.refused_at = now

    def tick(self, now: float) -> None:
        """Go on as far as what was heard allows."""
        step = {
            Phase.WAITING: self._meet,
            Phase.JOINING: self._join,
            Phase.RUNNING: self._watch,
            Phase.STOPPING: self._watch,
        }.get(self.phase)
        if step is not None:
            step(now)

    # What the supervisor decides -------------------------------------------------------------------------------------

    def back_off(self, note: str) -> None:
        self.phase, self.note = Phase.BACKING_OFF, note

    def be_ready(self) -> None:
        """The rank may be started."""
        self.phase, self.note = Phase.WAITING, ""

    def stop(self, note: str) -> None:
        """An end was asked for here; the others are told."""
        self.phase, self.note = Phase.STOPPING, note

    def end(self, death: Mapping[str, Any]) -> None:
        """This rank's vLLM has ended; `death` goes to the others."""
        self.phase = Phase.ENDED
        self.deaths[self.me.rank] = death

    # Steps -----------------------------------------------------------------------------------------------------------

    def _meet(self, now: float) -> None:
        if self.me.rank == 0:
            lives = [peer.live for peer in self.peers.values() if peer.is_fresh(now) and peer.live is not None]
            if len(lives) == len(self.peers) and all(live.phase == Phase.WAITING for live in lives):
                members = {0: self.me.session} | {live.sender: live.session for live in lives}
                self._enter(1 + max([self.known, *(live.known for live in lives)]), members, now)
                if not self.peers:
                    self.phase = Phase.RUNNING
            return
        head = self.peers[0]
        if not head.is_fresh(now) or head.live is None or head.live.phase != Phase.JOINING:
            return
        offered = head.live
        ours = {self.me.rank: self.me.session} | {
            peer.rank: peer.live.session for peer in self.peers.values() if peer.live
        }
        if dict(offered.members) == ours and offered.incarnation > self.known:
            self._enter(offered.incarnation, dict(offered.members), now)

    def _enter(self, incarnation: int, members: dict[int, str], now: float) -> None:
        self.incarnation = self.known = incarnation
        self.members = members
        self.phase = Phase.JOINING
        self._joined_at = now

    def _join(self, now: float) -> None:
        if self.me.rank == 0:
            peers = list(self.peers.values())
            if all(self._is_member(peer.live) and peer.live.phase in BOUND for peer in peers if peer.live):
                self.phase = Phase.RUNNING
            elif now - self._joined_at > JOIN_S or not all(self._has_session(peer.live) for peer in peers):
                self._leave()
            return
        head = self.peers[0]
        if not self._is_member(head.live) or not head.is_fresh(now, self.lost_s):
            self._leave()
        elif head.live is not None and head.live.phase == Phase.RUNNING:
            self.phase = Phase.RUNNING

    def _leave(self) -> None:
        """Back to waiting, before anything was started; the number is not used again."""
        self.phase, self.incarnation, self.members = Phase.WAITING, 0, {}

    def _watch(self, now: float) -> None:
        for peer in self.peers.values():
            if self.loss is None:
                self.loss = self._loss_of(peer, now)
            if self._is_member(peer.live) and peer.live is not None and peer.live.phase == Phase.STOPPING:
                self.stop_asked_by = peer.rank if self.stop_asked_by is None else self.stop_asked_by

    def _loss_of(self, peer: Peer, now: float) -> Loss | None:
        live, name = peer.live, f"rank {peer.rank}"
        if live is None or not self._has_session(live):
            return Loss(peer.rank, "replaced", f"{name} was started anew")
        if live.incarnation != self.incarnation or live.phase not in BOUND:
            if peer.bound_to != self.incarnation and now - self._joined_at <= self.lost_s:
                return None  # the head has heard it agree, and its beat to this rank is still on the way
            return Loss(peer.rank, "left", f"{name} left incarnation {self.incarnation}")
        if live.phase == Phase.ENDED:
            return Loss(peer.rank, "ended", f"{name} ended")
        refused = peer.refused_since is not None and peer.refused_at - peer.refused_since >= REFUSED_S
        if refused and now - peer.refused_at <= FRESH_S:
            return Loss(peer.rank, "gone", f"{name}'s supervisor is gone: its machine says that its port is closed")
        if now - peer.live_at > self.lost_s:
            return Loss(peer.rank, "silent", f"{name} has been silent for {now - peer.live_at:.1f} s")
        return None

    def _has_session(self, live: Beat | None) -> bool:
        return live is not None and live.session == self.members.get(live.sender)

    def _is_member(self, live: Beat | None) -> bool:
        return live is not None and self._has_session(live) and live.incarnation == self.incarnation

    def _is_of_ours(self, beat: Beat) -> bool:
        return beat.incarnation == self.incarnation and beat.session == self.members.get(beat.sender)

    # What goes out ---------------------------------------------------------------------------------------------------

    def beat_to(self, rank: int, now: float) -> Beat:
        """The next beat for a peer."""
        self._seq += 1
        peer = self.peers[rank]
        return Beat(
            sender=self.me.rank,
            generation=self.me.generation,
            spec=self.me.spec,
            session=self.me.session,
            echo=peer.claimed,
            seq=self._seq,
            sent=now,
            lag=peer.lag,
            phase=self.phase,
            incarnation=self.incarnation,
            known=self.known,
            members=self.members if self.me.rank == 0 else {},
            serving=self.serving,
            note=self.note or self._who_is_missing(now),
            death=self.deaths.get(self.me.rank) if self.phase == Phase.ENDED else None,
            heard=tuple(sorted(self.deaths)),
        )

    def is_settled(self, now: float) -> bool:
        """Whether every rank that is not lost knows this rank's death and has told its own."""
        for peer in self.peers.values():
            lost = self.loss is not None and self.loss.rank == peer.rank and self.loss.kind != "ended"
            told = peer.rank in self.deaths
            knows = peer.live is not None and self.me.rank in peer.live.heard
            if not lost and not (told and (knows or not peer.is_fresh(now, 1.0))):
                return False
        return True

    def last_heard(self) -> dict[int, float]:
        """When each member was heard last, of those that have not told how they ended.

        The member, and not what its machine has started in its place since.
        """
        silent = [rank for rank in self.peers if rank in self.members and rank not in self.deaths]
        return {rank: self.peers[rank].heard.get(self.members[rank], float("-inf")) for rank in silent}

    def offset(self, rank: int) -> float:
        """What to add to a time of that rank's clock to have it on this one's; 0.0 when it is not known."""
        peer = self.peers.get(rank)
        if peer is None or peer.live is None or peer.lag is None or peer.live.lag is None:
            return 0.0
        return (peer.lag - peer.live.lag) / 2

    def peer_table(self, now: float) -> list[dict[str, Any]]:
        """Every peer as it was last heard; `silent_s` is None for one that never was."""
        return [
            {
                "rank": peer.rank,
                "state": None if peer.live is None else "serving" if peer.live.serving else str(peer.live.phase),
                "silent_s": None if peer.live is None else round(now - peer.live_at, 1),
            }
            for peer in self.peers.values()
        ]

    def waiting_for(self, now: float) -> list[dict[str, Any]]:
        """Ranks without which nothing starts, each with the reason."""
        if self.phase != Phase.WAITING:
            return []
        found = []
        for peer in self.peers.values():
            why = self._obstacle(peer, now)
            if why:
                found.append({"rank": peer.rank, "why": why})
        return found

    def _who_is_missing(self, now: float) -> str:
        if self.me.rank != 0:
            return ""
        return "; ".join(f"rank {one['rank']} {one['why']}" for one in self.waiting_for(now))

    def _obstacle(self, peer: Peer, now: float) -> str:
        if now - peer.stranger_at <= 3 * FRESH_S and not peer.is_fresh(now):
            return peer.stranger
        if peer.live is None:
            return "was not heard yet" if not peer.claimed else "is heard, and does not hear this rank"
        if not peer.is_fresh(now):
            return f"has been silent for {now - peer.live_at:.0f} s"
        if peer.live.phase != Phase.WAITING:
            return f"is {peer.live.phase}" + (f": {peer.live.note}" if peer.live.note else "")
        return f"waits: {peer.live.note}" if peer.live.note and peer.rank == 0 else ""
