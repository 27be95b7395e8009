"""The pure parts of serving: facts, ports, receipts and states from what machines say."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from exl3kit import cli, facts, image_program, logs, nodes, ports, post_mortem, receipts, serve, status, takedown
from exl3kit.cli import watch
from exl3kit.errors import ExitCode, KitError
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


@pytest.mark.parametrize(
    ("deployment", "owner", "fix"),
    [
        ("demo-tp2", "deployment demo-tp2", "`kit down demo-tp2` with the same --nodes, or"),
        (None, "perl (process 6119)", "stop that, or"),
    ],
)
def test_a_port_of_another_comes_with_its_owner_and_what_frees_it(deployment: str | None, owner: str, fix: str) -> None:
    labels = {"io.exl3kit.ports": "8000,28000", "io.exl3kit.deployment": deployment}
    listed = [SimpleNamespace(labels=labels)] if deployment else []

    class Node:
        engine = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: listed))

        def run(self, argv: list[str]) -> SimpleNamespace:
            shown = 'LISTEN 0 5 127.0.0.1:8000 0.0.0.0:* users:(("perl",pid=6119,fd=3))\n'
            return SimpleNamespace(stdout=PROC if argv[0] == "cat" else shown, returncode=0)

        def error(self, what: str, **fields: Any) -> KitError:
            return KitError(what, where="node n0", **fields)

    with pytest.raises(KitError, match="port 8000 is in use") as refused:
        ports.require_free(Node(), [9000, 8000], spare="mine")  # type: ignore[arg-type]
    assert refused.value.why == f"by {owner}" and fix in str(refused.value.next_step)
    if deployment:
        ports.require_free(Node(), [8000], spare=deployment)  # type: ignore[arg-type]


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
    engine: str = "running",
    unhealthy: str | None = None,
    generation: str = "g1",
    fingerprint: str = "f",
    word: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    receipts_of_it = [{"fingerprint": fingerprint}] if engine == "running" else []
    own = word or ("serving" if engine == "running" and unhealthy is None else engine)
    told = {"engine_state": engine, "state": own, "unhealthy": unhealthy, "generation": generation, "waiting_for": []}
    return {**told, "receipts": receipts_of_it, "rank": 0, "node": "n0", **more}


AWAY = rank("none", "the node does not answer", word="unreachable", rank=1, node="n1")


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([rank(), rank()], "serving"),
        ([rank(), rank(unhealthy="no receipt yet", word="starting")], "starting"),
        ([rank(unhealthy="no token", word="starting"), rank(unhealthy="no peer", word="waiting")], "waiting"),
        ([rank(unhealthy="x", word="backing-off"), rank(unhealthy="no peer", word="waiting")], "backing-off"),
        ([rank(), rank("exited", "it ended")], "partial"),
        ([rank(), rank("restarting", "it ended")], "backing-off"),
        ([rank("restarting", "it ended"), rank("restarting", "it ended")], "backing-off"),
        ([rank()], "partial"),
        ([rank(), rank(fingerprint="e")], "mismatch"),
        ([rank(), rank(generation="g2")], "partial"),
        ([rank("exited", "it ended"), rank("created", "it never ran")], "stopped"),
        ([rank(), AWAY], "unreachable"),
    ],
)
def test_the_state_of_a_deployment_in_one_word(ranks: list[dict[str, Any]], word: str) -> None:
    assert status.state(ranks, expected=2) == word


def test_a_deployment_says_what_a_silent_node_means_and_what_a_rank_waits_for() -> None:
    assert "rank 1 on n1 cannot be asked" in str(status.note("unreachable", [rank(), AWAY]))
    waiting = rank(word="waiting", waiting_for=[{"rank": 1, "why": "was never heard"}])
    assert status.note("waiting", [waiting]) == "rank 0 waits for rank 1 (was never heard)"
    assert status.note("serving", [rank()]) is None


def test_tokens_per_second_come_from_two_looks_and_begin_anew_with_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0, 4.0, 6.0))
    monkeypatch.setattr(status.time, "monotonic", lambda: next(clock))
    speeds, rates = status.Speeds(), []
    for tokens in (100, 150, 10, 110):
        told: list[dict[str, Any]] = [
            {"deployment": "d", "ranks": [{"progress": None}, {"progress": {"generation_tokens": tokens}}]}
        ]
        speeds.add(told)
        rates.append(told[0]["tokens_per_s"])
    assert rates == [None, 25.0, None, 50.0]


def test_status_of_a_silent_node_says_what_to_do() -> None:
    refused = KitError("this user may not use it", why="permission denied", next_step="`usermod`")
    missing = {"n1": refused, "n2": KitError("gone")}
    every = [
        "node n1 cannot be asked: this user may not use it (permission denied); next: `usermod`",
        "node n2 cannot be asked: gone",
    ]
    said = [str(part) for part in watch.page([], missing, None, [])]
    assert said == ["what stands on n1, n2 is not known: no node can be asked", *every]
    said = [str(part) for part in watch.page([], missing, "demo", ["n3"])]
    assert said == ["nothing of demo stands on n3", *every]
    assert [str(part) for part in watch.page([], {}, None, ["local"])] == ["nothing of the kit stands on local"]


# What may be left after `down` ----------------------------------------------------------------------------------------


def test_a_node_of_a_cluster_file_is_not_given_as_a_name_that_ssh_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given names that only a cluster file may have, then no command says `--nodes` with one of them."""
    labels = {"nodes": "node1,node2"}
    one = SimpleNamespace(deployment="demo-tp2", label=lambda name: labels[name])
    (told,) = serve.strays([one], ["node1"])  # type: ignore[list-item]
    assert "has a rank on node2" in told and "`kit down demo-tp2` with --nodes" in told and "--nodes node2" not in told

    def missing(*_: Any, **__: Any) -> None:
        raise ImageNotFound("none")  # type: ignore[no-untyped-call]

    engine = SimpleNamespace(containers=SimpleNamespace(create=missing))
    monkeypatch.setattr(nodes.Node, "patient_engine", lambda *_: nullcontext(engine))
    node = nodes.Node("node2", engine, "unix:///played", "10.0.0.2", False, None, None)  # type: ignore[arg-type]
    with pytest.raises(KitError, match="has no image exl3kit:1") as refused:
        image_program.run(node, "exl3kit:1", ["true"])
    assert refused.value.next_step == "`kit build RECIPE` with the same --nodes"


def test_down_with_a_node_gone_names_what_may_run_there_and_how_to_finish() -> None:
    gone = KitError("the node does not answer", where="node spark2", why="no route", code=ExitCode.UNREACHABLE)
    down = takedown.Down("demo-tp2", ["exl3kit-demo-tp2-rank0"], {"spark2": gone}, [1])
    failure = down.failure("spark1,spark2")
    assert failure is not None and failure.code == ExitCode.UNREACHABLE
    assert "demo-tp2 may still run on spark2 (rank 1 of it)" in str(failure)
    assert "the node does not answer, no route" in str(failure)
    assert "`kit down demo-tp2 --nodes spark2`" in str(failure)
    assert "`kit down demo-tp2 --nodes my/two.yaml`" in str(down.failure("my/two.yaml")), "spark2 may be no ssh name"
    assert takedown.Down("demo-tp2", [], {}, []).failure("spark1") is None


# Logs -----------------------------------------------------------------------------------------------------------------

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "ago"), [("90s", 90), ("10m", 600), ("10 min", 600), ("2h", 7200), ("1d", 86400), ("0s", 0)]
)
def test_since_takes_a_span(text: str, ago: int) -> None:
    assert (NOON - logs.since(text, NOON)).total_seconds() == ago


def test_logs_of_nodes_that_cannot_be_asked_say_why_and_not_that_no_rank_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kit", "logs", "demo-tp2", "--nodes", "nosuch.invalid"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == ExitCode.UNREACHABLE
    assert "nosuch.invalid" in said and "next: " in said and "no rank of" not in said


def log_of(rank: int, text: str) -> Any:
    """A standing rank whose engine gives this log."""
    container = SimpleNamespace(logs=lambda **_: text.encode())
    return SimpleNamespace(rank=rank, container=container)


def test_a_progress_bar_is_a_line_per_state_among_those_of_the_other_ranks_by_time() -> None:
    """Given a bar that painted over its line, then each state has the line's stamp, and no state counts as one."""
    head = log_of(0, "2026-01-31T12:00:01Z a\n2026-01-31T12:00:03Z \rload 50%\rload 100%\n2026-01-31T12:00:04Z \n")
    worker = log_of(1, "2026-01-31T12:00:02Z b\x0bc\r\n2026-01-31T12:00:05Z d\n")
    told = [(line.stamp[17:19], line.one.rank, line.text) for line in logs.lines([head, worker], tail=None)]
    assert told == [
        ("01", 0, "a"), ("02", 1, "b\x0bc"), ("03", 0, "load 50%"), ("03", 0, "load 100%"), ("04", 0, ""),
        ("05", 1, "d"),
    ]  # fmt: skip


def test_a_bar_that_is_followed_is_split_as_well() -> None:
    chunks = [b"2026-01-31T12:00:01Z a\n2026-01-31T12:00:02Z \rload", b" 50%\rload 100%\n2026-01-31T12:00:03Z \rgraph"]
    engine = SimpleNamespace(api=SimpleNamespace(logs=lambda *_, **__: iter(chunks)))
    one = SimpleNamespace(
        container=SimpleNamespace(id="c"), node=SimpleNamespace(patient_engine=lambda _: nullcontext(engine))
    )
    last = "2026-01-31T12:00:01Z"
    assert [line.text for line in logs.stream(one, last)] == ["load 50%", "load 100%", "graph"]  # type: ignore[arg-type]


def test_since_takes_a_date_and_refuses_what_is_no_time() -> None:
    assert logs.since("2026-01-31T11:00:00+00:00", NOON) == datetime(2026, 1, 31, 11, tzinfo=UTC)
    for text in ("", "yesterday", "10", "-5m", "5x"):
        with pytest.raises(KitError, match="is no time"):
            logs.since(text, NOON)


# Post-mortems ---------------------------------------------------------------------------------------------------------


def death(incarnation: int, *ranks: int, generation: str = "g1") -> dict[str, Any]:
    return {
        "deployment_generation": generation,
        "incarnation": incarnation,
        "written": 1.8e9,
        "first": {
            "rank": 1,
            "process": "worker TP1",
            "kind": "exit",
            "sentence": "worker TP1 ended with signal SIGKILL",
        },
        "records": {
            str(rank): {"sentence": "it ended", "exit_code": None, "signal": "SIGKILL", "lines": ["last \x1b[31mwords"]}
            for rank in ranks
        },
        "missing": [rank for rank in (0, 1) if rank not in ranks],
    }


def test_the_newest_death_is_told_by_the_rank_that_heard_from_most() -> None:
    found = [death(3, 0, generation="g0"), death(1, 0), death(2, 1), death(2, 0, 1)]
    assert post_mortem.choose(found) == death(2, 0, 1)
    assert post_mortem.choose([]) is None


def test_a_post_mortem_names_who_died_first_and_what_each_rank_said_last() -> None:
    text = "\n".join(post_mortem.as_lines(death(2, 1)))
    assert "first: rank 1, worker TP1: worker TP1 ended with signal SIGKILL" in text
    assert "rank 1: it ended (SIGKILL)" in text
    assert "rank 0: said nothing more" in text
    assert "\x1b" not in text and "words" in text


def test_later_generations_sort_later() -> None:
    first = serve.new_generation()
    assert first < serve.new_generation()


def test_logs_name_a_post_mortem_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Given the lines of a supervisor, then the one with 10 kB of JSON is the command that shows it to people."""
    one = SimpleNamespace(rank=1, node=SimpleNamespace(name="n0"), deployment="demo")
    for text in ('exl3 rank 1: EXL3-POST-MORTEM {"first": {}}', "exl3 rank 1: waits for rank 0"):
        watch.print_line(logs.Line("", one, text), SimpleNamespace(is_terminal=False))  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [
        "rank1@n0 | -- a post-mortem: `kit logs demo --post-mortem` --",
        "rank1@n0 | exl3 rank 1: waits for rank 0",
    ]
