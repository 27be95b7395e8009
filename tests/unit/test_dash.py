"""The page of `kit dash` over HTTP: what it shows of nodes that answer, fail, hang and die, and whom it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dash_cluster import (
    CAMPAIGN,
    KEY,
    METRICS,
    QUICK,
    REPOSITORY,
    WAIT,
    Played,
    PlayedRank,
    death,
    gone,
    served,
    two_nodes,
)

from exl3kit.dash import server as servers
from exl3kit.dash import view
from exl3kit.dash.asker import Counters, of_metrics
from exl3kit.dash.gather import Facts, Gatherer
from exl3kit.dash.last_bench import LastBench
from exl3kit.dash.rates import Recent, Speed
from exl3kit.dash.server import Server
from exl3kit.dash.watcher import Times
from exl3kit.errors import KitError


def ask(
    server: Server, method: str = "GET", path: str = "/", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


@contextmanager
def events(server: Server) -> Iterator[Iterator[dict[str, str]]]:
    """What the stream of events says, as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    try:
        yield (json.loads(line[6:]) for line in iter(answer.readline, b"") if line.startswith(b"data: "))
    finally:
        answer.close()
        connection.close()


def until(server: Server, holds: Callable[[dict[str, str]], Any]) -> dict[str, str]:
    """The first event for which that holds."""
    deadline = time.monotonic() + WAIT
    with events(server) as stream:
        for event in stream:
            if holds(event):
                return event
            assert time.monotonic() < deadline, event["main"]
    raise AssertionError("the stream ended")


def words(html: str) -> str:
    """What a reader sees of it."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# What is shown --------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_ranks_and_their_nodes_tell() -> None:
    with served(two_nodes()) as server:
        status, _, page = ask(server)
        said = words(page)
    assert status == 200
    for expected in (
        "demo-tp2 serving", "rank 0 on node1 serving", "rank 1 on node2 serving", "generation 20261130T145600.179728Z",
        "incarnation 3", "tier legacy", "model demo", "API port 8000", "image 361ce8defe86", "in this state for 12 min",
        "2 run, 1 wait", "KV cache 31%", "18.0 GiB free", "17.0 GiB free, pressure 3 %",
        "Gloo, TCP over eth0 to 10.77.6.2", "0.3 MB trellis, legacy", "2 receipts: the ranks agree",
        "fingerprint 9c62b5a3fede", "No death of this gang is on record", "node1 answers", "holds rank 1 of demo-tp2",
        "TTFT, since start 250 ms over", "No campaign lies in",
    ):  # fmt: skip
        assert expected in said, said


def test_speed_comes_live_from_the_heads_counters() -> None:
    with served(two_nodes()) as server:
        event = until(server, lambda event: "<polyline" in event["main"])
        event = until(server, lambda event: re.search(r"last minute 250 ms over \d+ request", words(event["main"])))
    assert re.search(r"tokens/s [1-9][\d.]* ", words(event["main"])), words(event["main"])
    assert re.search(r"tokens/s, last \d+ s: [\d.]+ to [1-9]", words(event["main"])), words(event["main"])


def test_a_death_is_shown_as_it_happens_and_the_sentence_for_hearing_changes_with_it() -> None:
    played = two_nodes()
    dead = (
        "waits for rank 1 (was not heard for 9 s)", "rank 1 on node2 exited", "the container is exited",
        "first rank 1, worker TP1: worker TP1 ended with signal SIGKILL", "rank 0: rank 1 ended",
        "kit logs demo-tp2 --nodes node1,node2 --post-mortem", "tokens/s - TTFT, last minute - TTFT, since start -",
    )  # fmt: skip
    with served(played) as server:
        until(server, lambda event: event["news"] == "demo-tp2: serving." and "<polyline" in event["main"])
        played.nodes["node2"][0] = PlayedRank(1, engine="exited", death=death())
        played.nodes["node1"][0].state, played.nodes["node1"][0].death = "waiting", death()
        after = until(server, lambda event: all(said in words(event["main"]) for said in dead))
    assert after["news"] == "demo-tp2: partial." and "<polyline" not in after["main"]


def test_a_death_is_told_by_a_stopped_container_and_by_what_down_kept() -> None:
    died = "first rank 1, worker TP1: worker TP1 ended with signal SIGKILL"
    with served(Played({"node1": [PlayedRank(0, ranks=1, engine="exited", death=death())]})) as server:
        said = words(ask(server)[2])
        assert "demo-tp2 stopped" in said and died in said
    with served(Played({"node1": []}, named="demo-tp2", kept=death())) as server:
        said = words(ask(server)[2])
        assert "Nothing of demo-tp2 stands" in said and died in said and "Kept by kit down" in said


def test_a_node_that_fails_is_shown_with_its_reason_and_comes_back() -> None:
    played = two_nodes()
    played.errors["node2"] = gone("node2")
    with served(played) as server:
        status, _, page = ask(server)
        said = words(page)
        assert status == 200
        for expected in (
            "node2 unreachable", "ssh says: Connection timed out", "next: check that it is switched on and ping node2",
            "demo-tp2 unreachable", "rank 1 on node2 unreachable", "rank 0 on node1 serving", "18.0 GiB free",
        ):  # fmt: skip
            assert expected in said, said
        del played.errors["node2"]
        until(server, lambda event: event["news"] == "demo-tp2: serving.")


def test_a_node_that_hangs_is_shown_as_silent_and_the_others_go_on() -> None:
    played = two_nodes()
    played.hung["node2"] = threading.Event()
    with served(played, times=Times(period=0.05, retry=0.05, silent=0.5, interest=2.0)) as server:
        event = until(server, lambda event: "has not answered for" in event["main"])
        assert "rank 0 on node1 serving" in words(event["main"])
        played.hung.pop("node2").set()
        until(server, lambda event: event["news"] == "demo-tp2: serving.")


def test_what_no_one_expected_of_a_node_is_shown_too() -> None:
    played = two_nodes()
    del played.nodes["node2"][0].receipt  # the player itself is broken
    with served(played) as server:
        said = words(until(server, lambda event: "node2" in event["news"])["main"])
    assert "the node cannot be asked: AttributeError" in said and "rank 0 on node1 serving" in said


def test_receipts_that_differ_are_named() -> None:
    played = Played({"node1": [PlayedRank(0)], "node2": [PlayedRank(1, receipt={"effective_tier": "sorted"})]})
    with served(played) as server:
        said = words(ask(server)[2])
    assert "tier legacy / sorted" in said and "2 receipts: the ranks disagree" in said
    assert "the ranks disagree about effective_tier (rank 0 on node1:" in said


def test_nothing_stands_and_no_node_answers_are_different_pages() -> None:
    with served(Played({"node1": []})) as server:
        said = words(ask(server)[2])
        assert "Nothing of the kit stands" in said and "kit up RECIPE --nodes node1" in said
    with served(Played({"node1": []}, errors={"node1": gone("node1")})) as server:
        said = words(ask(server)[2])
        assert "No node answers" in said and "Nothing of the kit stands" not in said


def test_what_is_old_is_not_shown_as_new_and_what_is_not_known_yet_is_said() -> None:
    facts = Facts(time.time(), "node1,node2", None, ("node1", "node2"), ages={"node1": 8.2, "node2": 2.1})
    said = words(view.main(facts))
    assert "told 8 s ago" in said and said.count("told") == 1
    asking = words(view.main(replace(facts, asked=("node2",))))
    assert "Asking the nodes node2 did not answer yet" in asking and "stands" not in asking


def test_two_names_of_this_machine_are_one_node() -> None:
    assert Gatherer("local,local", None, two_nodes().opened, lambda: None).nodes == ("local",)


# The readers ----------------------------------------------------------------------------------------------------------


def test_many_readers_cost_the_nodes_what_one_does_and_none_cost_nothing() -> None:
    played = two_nodes()
    times = Times(period=0.1, retry=0.1, silent=WAIT, interest=0.2)
    with served(played, times=times) as server:
        streams = [events(server) for _ in range(5)]
        opened = [stream.__enter__() for stream in streams]
        for _ in range(3):
            assert all("node1" in next(one)["main"] for one in opened)
        played.asked = 0
        begun = time.monotonic()
        for _ in range(4):
            for one in opened:
                next(one)
        assert played.asked <= 2 * (1 + (time.monotonic() - begun) / times.period)
        for stream in streams:
            stream.__exit__(None, None, None)
        deadline, quiet = time.monotonic() + WAIT, False
        while not quiet and time.monotonic() < deadline:  # who left is missed when nothing can be written any more
            before = played.asked
            time.sleep(0.3)
            quiet = played.asked == before
        assert quiet
        assert "demo-tp2 serving" in words(ask(server)[2])  # and the next one gets what is true now


def test_a_reader_that_waits_for_news_is_one_that_looks() -> None:
    times = Times(period=0.1, retry=0.1, silent=WAIT, interest=0.0)
    with served(two_nodes(), times=times) as server, events(server) as stream:
        assert all(next(stream) for _ in range(4))


def test_readers_that_leave_in_the_middle_end_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with served(two_nodes()) as server:
        for request in (b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HT", b"\x00\xff\r\n\r\n", b""):
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT) as one:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leaves with a reset
                    one.sendall(request)
                    time.sleep(0.01)
        time.sleep(0.2)
        assert ask(server)[0] == 200
    assert capfd.readouterr() == ("", "")


# Who is refused -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet() -> Iterator[Server]:
    with served(two_nodes()) as server:
        yield server


@pytest.mark.parametrize("path", ["/", "/events", "/dash.js", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example", "localhost.", "",
                                  "0.0.0.0", "[::1]", "10.0.0.1:8787", "127.0.0.1@evil.example"])  # fmt: skip
def test_a_host_that_is_not_this_machine_gets_nothing(quiet: Server, path: str, host: str) -> None:
    status, _, body = ask(quiet, path=path, headers={"Host": host})
    assert status == 403 and "demo" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:9999", "127.0.0.1:8787"])
def test_this_machines_names_are_served_under_any_port(quiet: Server, host: str) -> None:
    assert ask(quiet, headers={"Host": host})[0] == 200


def test_a_request_with_two_hosts_or_none_is_refused(quiet: Server) -> None:
    for lines in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", quiet.server_port), timeout=WAIT) as one:
            one.sendall(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
            assert one.makefile("rb").readline().split()[1] == b"403"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/events"])
def test_nothing_can_be_changed(quiet: Server, method: str, path: str) -> None:
    status, headers, _ = ask(quiet, method, path)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/nothing", "/server.py", "/../server.py", "//etc/passwd", "/dash.css/", "/%2e%2e/"])
def test_there_is_nothing_but_the_page(quiet: Server, path: str) -> None:
    assert ask(quiet, path=path)[0] == 404


def test_the_page_is_one_of_its_own_and_says_so_to_the_browser(quiet: Server) -> None:
    for path in ("/", "/dash.css", "/dash.js", "/nothing"):
        _, headers, body = ask(quiet, path=path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
        assert "Access-Control-Allow-Origin" not in headers
        assert not re.search(r"https?://|style=|<style|<script(?! src)|\son\w+=\"", body), path
    assert ask(quiet, "HEAD")[2] == "" and int(ask(quiet, "HEAD")[1]["Content-Length"]) > 3000


def test_it_listens_on_loopback_alone_and_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, quiet: Server) -> None:
    assert quiet.socket.getsockname()[0] == "127.0.0.1"
    gatherer = Gatherer("node1", None, two_nodes().opened, lambda: None)
    with pytest.raises(KitError, match="cannot be had") as refused:
        Server(gatherer, quiet.server_port)
    assert refused.value.code == 3 and "--port" in str(refused.value)
    monkeypatch.setattr(servers, "PORT", quiet.server_port)
    with Server(gatherer) as other:
        assert other.server_port not in (0, quiet.server_port)


def test_no_key_no_prompt_and_no_markup_of_a_rank_comes_into_the_page() -> None:
    played = Played(
        {"node1": [PlayedRank(0, death=death(f"<script>alert(1)</script>\x1b[31m Bearer {KEY}"))], "node2": []}
    )
    with served(played) as server:
        page = ask(server)[2]
        event = until(server, lambda event: "alert(1)" in event["main"])
    for text in (page, event["main"]):
        assert KEY not in text and "a prompt of a user" not in text
        assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text and "\x1b" not in text


# Parts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("looks", "moved"),
    [
        ([], None),
        ([(0, 5)], None),
        ([(0, 5), (2, 9)], (2, 4)),
        ([(0, 5), (2, 9), (2, 9)], (2, 4)),  # the same look twice
        ([(0, 5), (4, 9), (8, 9), (12, 19)], (8, 10)),  # the first is too old
        ([(0, 5), (2, 9), (4, 1)], None),  # begun anew
        ([(0, 5), (2, 9), (4, 1), (6, 3)], (2, 2)),
        ([(0, 5), (60, 99)], None),  # nobody looked meanwhile
    ],
)
def test_rates_are_of_the_last_seconds_alone(looks: list[tuple[float, float]], moved: tuple[float, ...] | None) -> None:
    recent = Recent(10)
    for at, counter in looks:
        recent.add(at, counter)
    assert recent.moved() == moved


def test_speed_is_tokens_of_ten_seconds_and_first_tokens_of_a_minute() -> None:
    speed, told = Speed(), []
    for counted in ((0, 100, 5.0, 10), (5, 300, 5.0, 10), (10, 500, 6.0, 14), (15, 900, 6.0, 14)):
        for _ in range(2):  # the same look twice is one
            speed.add(Counters(*counted))
        told.append(speed.as_json())
    assert [one["tokens_per_s"] for one in told] == [None, 40.0, 40.0, 60.0]
    assert (told[-1]["history"], told[-1]["history_s"]) == ([40.0, 40.0, 60.0], 10)
    assert [one["ttft"] for one in told] == [None, None, (0.25, 4), (0.25, 4)]
    assert told[-1]["ttft_since_start"] == (6.0 / 14, 14)


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (METRICS.format(count=8, total=2.0), Counters(1.0, 8, 2.0, 8)),
        (METRICS.format(count=8, total=2.0).replace('engine="0"', 'engine="1"') + METRICS.format(count=1, total=1.0),
         Counters(1.0, 9, 3.0, 9)),
        (METRICS.format(count=8, total="nan"), None),
        ("vllm:generation_tokens_total 3\n", None),
        ("<html>", None),
        ("", None),
    ],
)  # fmt: skip
def test_counters_are_read_from_the_metrics_or_not_at_all(text: str, counted: Counters | None) -> None:
    assert of_metrics(1.0, text) == counted


def test_the_last_bench_is_the_newest_of_the_recipe_and_read_once(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        shutil.copy(CAMPAIGN, tmp_path / name)
        os.utime(tmp_path / name / CAMPAIGN.name, (number, number))
    newest = LastBench(tmp_path, None)
    told = newest()
    assert told is not None and told["folder"].endswith("new") and told["verdict"] == "valid" and told is newest()
    assert [row[0] for row in told["table"]["rows"]] == ["63", "127", "255"]
    assert LastBench(tmp_path, "demo-tp2")() and LastBench(tmp_path, "another")() is None
    assert LastBench(tmp_path / "none", None)() is None
    with served(two_nodes(), bench=tmp_path) as server:
        said = words(ask(server)[2])
    assert "kit bench prefill: demo-tp2 , 2026-11-30" in said and "203 113 224 25.1% 309.7" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it cannot be read"),
        ("torn {", "it cannot be read"),
        ('{"record": "campaign"}\n{"record": "result"}\n', "it cannot be read"),
        ("".join(CAMPAIGN.read_text().splitlines(keepends=True)[:-1]), r"no result yet: .* \(19 observations\)"),
    ],
)
def test_a_bench_that_runs_or_broke_off_is_said_and_never_a_figure(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / CAMPAIGN.name).write_text(text)
    told = LastBench(tmp_path, None)()
    assert told is not None and told["verdict"] is None and told["table"] is None
    assert re.search(says, told["lines"][0]), told


def test_a_fault_of_the_kit_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("of the bench")

    gatherer = Gatherer("node1", None, Played({"node1": []}).opened, broken, QUICK)
    gatherer.start()
    _, facts = gatherer.now(WAIT)
    gatherer.stop()
    assert "ZeroDivisionError: of the bench" in words(view.page(facts))


def test_the_verb_prints_where_the_page_is_and_ctrl_c_is_its_normal_end() -> None:
    """Given nodes that nobody knows, then the page is there and says so, and it ends without a word."""
    command = [sys.executable, "-m", "exl3kit.cli", "dash", "--nodes", "no-such-node.invalid", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        try:
            told = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
            connection = http.client.HTTPConnection("127.0.0.1", int(told["address"].split(":")[2].strip("/")))
            connection.request("GET", "/")
            assert "no-such-node.invalid" in connection.getresponse().read().decode()
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0 and process.communicate() == ("", "")
        finally:
            process.kill()
