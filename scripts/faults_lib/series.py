"""Rounds of faults, each judged by its right end, and the table of all."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rig_lib import cgroups

from exl3kit.errors import KitError
from faults_lib.faults import ENDED, FAULTS, RIDDEN_OUT, Fault
from faults_lib.gang_on_rig import GangOnRig
from faults_lib.soak import soak

RECOVER_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """One run. Times in seconds; None where the right end has no such time."""

    fault: str
    engine: str
    right: str
    held: bool
    why: str
    to_end: float | None
    to_recover: float | None
    named: str | None  # whom each rank's post-mortem named first
    named_right: bool | None


def main(documentation: str) -> int:
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("small", "vllm"), default="small")
    parser.add_argument("--over", action="store_true", help="no build: this overlay laid over an image that is there")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose names contain one of these words, separated by commas")
    parser.add_argument("--json", type=Path, help="file that the runs are added to")
    parser.add_argument("--minutes", type=float, default=1e9, help="no new run after so many")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="no fault: many clients for so long, 0 errors")
    parser.add_argument("--clients", type=int, default=64, help="of --soak (default: %(default)s)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print the table of runs kept there")
    options = parser.parse_args()
    if options.table:
        print(table(Outcome(**run) for path in options.table for run in json.loads(path.read_text())))
        return 0
    words = [word for word in options.only.split(",") if word]
    chosen = [
        fault
        for fault in FAULTS
        if options.engine in fault.engines and (not words or any(word in fault.name for word in words))
    ]
    try:
        gang = GangOnRig(options.engine, over=options.over)
    except RuntimeError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 3
    if options.soak:
        told = soak(gang, options.clients, options.soak)
        print(json.dumps(told, indent=1))
        return 0 if told["held"] else 1
    outcomes: list[Outcome] = []
    until = time.monotonic() + options.minutes * 60
    try:
        for number in range(options.rounds):
            for fault in chosen:
                if time.monotonic() > until or (fault.runs is not None and number >= fault.runs):
                    continue
                outcome = run(gang, fault)
                outcomes.append(outcome)
                print(line(outcome), flush=True)
                if options.json:
                    keep(options.json, outcome)
    finally:
        done = gang.down()
        print(f"kit down: exit code {done.returncode}; left behind: {', '.join(left_behind(gang)) or 'nothing'}")
        print(done.stderr if done.returncode else "", end="")
    print(table(outcomes))
    return 0 if all(one.held and one.named_right is not False for one in outcomes) else 1


def run(gang: GangOnRig, fault: Fault) -> Outcome:
    """One fault, from a serving gang to a serving gang."""
    held, why, to_end, to_recover, named, right = False, "", None, None, None, None
    try:
        serve_again(gang)
        if gang.ask() != "200":
            raise AssertionError("the gang did not answer before the fault")
        if fault.right == ENDED:
            to_end, to_recover, named, right = end_and_recover(gang, fault)
        elif fault.right == RIDDEN_OUT:
            ride_out(gang, fault)
        else:
            fault.inject(gang)
        held = True
    except Exception as error:  # whatever it was: told in its row, and the series goes on
        why = str(error) or repr(error)
        with contextlib.suppress(Exception):
            if fault.mend is not None:
                fault.mend(gang)
    return Outcome(fault.name, gang.engine, fault.right, held, why[:300], to_end, to_recover, named, right)


def serve_again(gang: GangOnRig) -> None:
    """From whatever the last run left; a host that a busy machine keeps from answering ssh is asked again."""
    for tries_left in (2, 1, 0):
        try:
            if not gang.is_serving(0):
                gang.up()
            return
        except KitError as error:
            if not tries_left:
                raise RuntimeError(f"the gang does not start: {error}") from error


def end_and_recover(gang: GangOnRig, fault: Fault) -> tuple[float, float, str, bool]:
    before, incarnation = gang.vllm(), gang.incarnation()
    begun = time.monotonic()
    if fault.under_load:
        with gang.load():
            begun = time.monotonic()
            fault.inject(gang)
            gone = gang.wait_gone(before, fault.within + 20)
    else:
        fault.inject(gang)
        gone = gang.wait_gone(before, fault.within + 20)
    to_end = time.monotonic() - begun
    if gone is None:
        raise AssertionError(f"processes of the old incarnation live {fault.within + 20:.0f} s later")
    if fault.mend is not None:
        fault.mend(gang)
    begun = time.monotonic()
    gang.wait_serving(incarnation, RECOVER_S)
    to_recover = time.monotonic() - begun
    if gang.ask() != "200":
        raise AssertionError("serving again, and a request is not answered")
    if to_end > fault.within:
        raise AssertionError(f"ended after {to_end:.1f} s, and {fault.within:.0f} s are allowed")
    firsts = {rank: gang.post_mortem(rank) for rank in (0, 1)}
    fresh = {rank: one["first"] for rank, one in firsts.items() if one.get("incarnation", 0) >= incarnation}
    said = (f"rank {rank}'s: {one['kind']} of rank {one['rank']} {one['process']}" for rank, one in fresh.items())
    right = bool(fresh) and all(any(blame.fits(one) for blame in fault.blame) for one in fresh.values())
    return to_end, to_recover, "; ".join(said), right


def ride_out(gang: GangOnRig, fault: Fault) -> None:
    before, incarnation = gang.vllm(), gang.incarnation()
    begun = time.monotonic()
    fault.inject(gang)
    while time.monotonic() - begun < fault.hold_s:
        if not all(one.lives() for one in before):
            raise AssertionError("a process ended")
        time.sleep(0.1)
    answer = gang.ask()
    if fault.mend is not None:
        fault.mend(gang)
    if answer != "200" or gang.incarnation() != incarnation:
        raise AssertionError(f"the answer is {answer}, the incarnation {gang.incarnation()} and not {incarnation}")


def left_behind(gang: GangOnRig) -> list[str]:
    """Containers, and processes of containers, on both hosts."""
    left = [f"process {one.command[:60]}" for rank in (0, 1) for one in gang.seen(rank)]
    for name in gang.nodes:
        if cgroups.processes(name):
            left += gang.inside(name, "docker", "ps", "--all", "--format", f"container {{{{.Names}}}} on {name}").split(
                "\n"
            )
            left += [
                f"port of {name}: {row}"
                for row in gang.inside(name, "ss", "-Hlntu").splitlines()
                if any(f":{port} " in row for port in (8000, 18000, 28000))
            ]
    return [one for one in left if one]


def keep(path: Path, outcome: Outcome) -> None:
    kept: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*kept, asdict(outcome)], indent=1) + "\n")


def line(one: Outcome) -> str:
    times = " ".join(
        f"{word} {seconds:.1f} s"
        for word, seconds in (("end", one.to_end), ("again", one.to_recover))
        if seconds is not None
    )
    word = "held" if one.held and one.named_right is not False else "FAILED"
    return f"{word:6} {one.fault}: {times} {one.named or ''} {one.why}".rstrip()


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a row per fault and engine."""
    rows: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        rows.setdefault((one.engine, one.fault, one.right), []).append(one)
    said = ["| engine | fault | right end | runs | held | to the end, s | to serving again, s | post-mortem right |"]
    said.append("|---|---|---|---|---|---|---|---|")
    for (engine, fault, right), runs in rows.items():
        ends = spread([one.to_end for one in runs])
        again = spread([one.to_recover for one in runs])
        judged = [one.named_right for one in runs if one.named_right is not None]
        named = f"{sum(judged)} of {len(judged)}" if judged else "-"
        held = sum(one.held for one in runs)
        said.append(f"| {engine} | {fault} | {right} | {len(runs)} | {held} | {ends} | {again} | {named} |")
    return "\n".join(said)


def spread(seconds: Iterable[float | None]) -> str:
    """Median and largest."""
    known = [one for one in seconds if one is not None]
    return f"{statistics.median(known):.1f} (max {max(known):.1f})" if known else "-"
