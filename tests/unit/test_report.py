"""`kit report`: one archive that holds what helps and no secret, whatever is broken."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dash_cluster import KEY as PLANTED_KEY
from dash_cluster import Played, PlayedRank, death, gone

from exl3kit import paths, redaction, report
from exl3kit.errors import ExitCode, KitError
from exl3kit.nodes import Node
from exl3kit.redaction import MASK, Redactor

PLANTED = {
    "HF_TOKEN": "hf_" + "Planted0" * 4,
    "MY_API_KEY": "opaque value/with=signs",
    "DB_PASSWORD": "correct horse",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIplantedEXAMPLEKEY",
}
KEY = "the-api-key-of-the-recipe"
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaHBsYW50ZWQ\nAAAAplanted\n-----END OPENSSH PRIVATE KEY-----"
UNKNOWN = {  # in no variable of this machine: found by the name beside it, or by its shape
    "HUGGING_FACE_HUB_TOKEN=plainword77 and more": "plainword77",
    '{"api_key": "with blank and \\u00e4"}': "with blank and",
    "vllm serve --api-key=sesame42x --port 8000": "sesame42x",
    "['--hf-token', 'sesame43x']": "sesame43x",
    "Authorization: Bearer abcdefgh.12345678": "abcdefgh.12345678",
    "proxy https://user:hunter22@proxy.example/": "hunter22",
    "key sk-plantedplantedplanted in a sentence": "sk-plantedplantedplanted",
    "ghp_plantedplantedplanted1": "ghp_plantedplantedplanted1",
    "found AKIAPLANTEDPLANTEDPL": "AKIAPLANTEDPLANTEDPL",
    "jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.planted_sig": "planted_sig",
    PEM: "b3BlbnNzaHBsYW50ZWQ",
    'told: {\\"password\\": \\"escaped99\\"}': "escaped99",
    "a line in JSON\\nsk-behind_a_line_break": "sk-behind_a_line_break",
}
HARMLESS = (
    "max_tokens=8, generation_tokens: 44, prompt tokens 12",
    "api_key_file: my.key",
    "EXL3_GANG_SECRET_FILE=/run/secrets/gang",
    "sha256 5aef9bb5ecd8852b3dd329ba1f2f86d7a9541b8907aa222820fd7a6633ed869c",
    "http://127.0.0.1:8000/v1/completions",
    "token: null",
    " + tiktoken=0.9.0",
)


@dataclass(frozen=True)
class LogOnly:
    """What the report needs of a container's log: docker-py gives the lines as bytes, each after its time."""

    text: str

    def logs(self, **_: object) -> bytes:
        return "".join(f"2026-01-31T12:00:0{n}Z {line}\n" for n, line in enumerate(self.text.splitlines())).encode()


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Rank:
    container: LogOnly
    deployment: str = "two"
    rank: int = 1
    node: Named = Named("spark2")


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folders = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(
        [sys.executable, "-m", "exl3kit.cli", "report", *words],
        cwd=folder,
        env={**os.environ, **folders, "PYTHONPATH": str(paths.REPO), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- redaction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "secret"), UNKNOWN.items())
def test_secrets_that_nobody_told_of_are_found_by_name_and_shape(text: str, secret: str) -> None:
    redactor = Redactor()
    assert secret not in redactor.text(f"before {text} after")
    assert redactor.count >= 1


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize("secret", [*PLANTED.values(), 'quo"te\\d'])
def test_known_values_go_in_every_spelling(secret: str) -> None:
    """Given a value that is known to be secret, then it goes plain, quoted in JSON, in a URL and in base64."""
    from urllib.parse import quote

    spelled = [secret, json.dumps(secret)[1:-1], quote(secret, safe=""), base64.b64encode(secret.encode()).decode()]
    masked = Redactor([secret]).text(" and ".join(f"<{text}>" for text in spelled))
    assert not any(text.rstrip("=") in masked for text in spelled)


def test_data_is_masked_by_key_by_name_beside_it_and_behind_an_option() -> None:
    told = {
        "HF_TOKEN": "a", "max_tokens": 8, "settings": [{"name": "NCCL_SECRET", "value": "b"}],
        "argv": ["--api-key", "c", "--port", "8000"], "env": ["OPENAI_API_KEY=d"],
    }  # fmt: skip
    assert Redactor().data(told) == {
        "HF_TOKEN": MASK, "max_tokens": 8, "settings": [{"name": "NCCL_SECRET", "value": MASK}],
        "argv": ["--api-key", MASK, "--port", "8000"], "env": [f"OPENAI_API_KEY={MASK}"],
    }  # fmt: skip


@pytest.mark.parametrize("text", ["a.b-" * 50_000, "-" * 100_000, "token=" * 20_000, "x" * 200_000, "a://" * 50_000])
def test_long_lines_take_no_long_time(text: str) -> None:
    """Given lines that a careless pattern would look at once for each of their letters, seconds do."""
    begun = time.monotonic()
    Redactor(["something"], ("/home/ada", "ada")).text(text)
    assert time.monotonic() - begun < 10  # 0.1 s when nothing else runs


def test_home_and_user_go_when_asked() -> None:
    hidden = Redactor(home=("/home/ada", "ada")).text("/home/ada/x /home/bob/y ada@spark1 canada")
    assert hidden == "~/x /home/USER/y USER@spark1 canada"
    assert Redactor().text("/home/ada/x") == "/home/ada/x"


# ---- the archive -----------------------------------------------------------------------------------------------------


def planted_report(home: tuple[str, str] | None = None) -> report.Report:
    return report.Report(Redactor([*PLANTED.values(), KEY], home))


def test_no_byte_of_the_archive_holds_a_planted_secret(tmp_path: Path) -> None:
    """Given secrets in logs, receipts, post-mortems and reasons, then the archive holds none of them, and the rest."""
    everything = "\n".join([*UNKNOWN, *PLANTED.values(), KEY, "the line that matters"])
    made = planted_report()
    made.attempt("logs/x", report.add_log, "logs/two-rank1-spark2.log", Rank(LogOnly(everything)), 500)
    made.add_data("receipts.json", "receipts", [{"note": everything, "env": dict(PLANTED)}])
    made.add_text("recipe.yaml", "recipe", f"serve: {{api_key: {KEY}}}\n{everything}")
    made.leave_out("node spark1", f"ssh says: {everything}")

    def broken(_: report.Report) -> None:
        raise RuntimeError(everything)

    made.attempt("doctor.json", broken)
    report.write(made, tmp_path / "r.tar.gz")
    written = (tmp_path / "r.tar.gz").read_bytes()
    plain = gzip.decompress(written)
    for secret in [*UNKNOWN.values(), *PLANTED.values(), KEY]:
        assert secret.encode() not in plain, secret
    held = contents(written)
    assert b"the line that matters" in held["report/logs/two-rank1-spark2.log"]
    assert json.loads(held["report/contents.json"])["left_out"][1]["what"] == "doctor.json"
    assert f"({made.redactor.count} places)".encode() in held["report/README.txt"]
    assert (tmp_path / "r.tar.gz").stat().st_mode & 0o777 == 0o600


def test_members_name_no_owner(tmp_path: Path) -> None:
    made = planted_report()
    made.add_text("a", "a", "text")
    with tarfile.open(fileobj=io.BytesIO(report.archive(made))) as opened:
        assert {(one.uname, one.gname, one.uid, one.gid) for one in opened} == {("", "", 0, 0)}


def test_a_report_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(KitError) as refused:
        report.write(planted_report(), tmp_path / "there")
    assert refused.value.code == ExitCode.USAGE and (tmp_path / "there").read_text() == "mine"


def test_ranks_of_nodes_that_answer_are_in_it_with_the_reason_for_every_gap() -> None:
    """Given a gang that has died on one node, a node that is gone, and a key in log and post-mortem, then all that can
    be had of the first is there without the key, and of the other the reason."""
    dead = PlayedRank(1, engine="running", death=death(f"refused: --api-key {PLANTED_KEY}"))
    played = Played({"node2": [dead]})
    container = dead.container()
    container.logs = LogOnly(f"Authorization: Bearer {PLANTED_KEY}\nlast words").logs
    engine: Any = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: [container]))

    def run(argv: list[str], **_: Any) -> Any:
        return SimpleNamespace(stdout="", stderr="", returncode=1)

    node = Node("node2", engine, "unix:///played", "10.77.6.2", False, run, None)  # type: ignore[arg-type]
    made = report.Report(Redactor())
    with played.answering():
        report.gather(made, None, (), [node], {"node1": gone("node1")}, 100)
    assert json.loads(made.members["status.json"])[0]["state"] == "unreachable"
    assert json.loads(made.members["receipts.json"])[0]["node"] == "node2"
    assert b"last words" in made.members["logs/demo-tp2-rank1-node2.log"]
    assert json.loads(made.members["post-mortem/demo-tp2.json"])["first"]["rank"] == 1
    assert PLANTED_KEY.encode() not in gzip.decompress(report.archive(made))
    reasons = {one["what"]: one["why"] for one in made.left_out}
    assert "Connection timed out" in reasons["everything of node node1"]
    assert "doctor.json" in reasons  # a node that tells nothing of itself stops the doctor, and not the report


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_the_verb_tells_what_is_in_it_when_no_node_answers(tmp_path: Path) -> None:
    """Given nodes that do not exist, and secrets all around, then an archive comes all the same."""
    (tmp_path / "my.key").write_text(KEY + "\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("recipe: 1\nname: mine\nextends: demo\nserve: {listen: open, api_key_file: my.key}\n")
    (tmp_path / "cache" / "exl3kit" / "logs").mkdir(parents=True)
    log = tmp_path / "cache" / "exl3kit" / "logs" / "build-x.log"
    log.write_text(f"step 3 failed\n{PLANTED['HF_TOKEN']} {KEY}\n{PEM}\n")
    done = run(tmp_path, str(recipe), "--nodes", "a.invalid,b.invalid", "--out", "r.tar.gz", "--json", **PLANTED)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    held = contents((tmp_path / "r.tar.gz").read_bytes())
    assert set(told["files"]) == {name.removeprefix("report/") for name in held} - {"README.txt", "contents.json"}
    assert {"kit.json", "doctor.json", "recipe.yaml", "lock.json", "build-logs/build-x.log"} <= set(told["files"])
    assert any(name.startswith("pins/") for name in told["files"])
    reasons = {one["what"]: one["why"] for one in told["left_out"]}
    assert {"everything of node a.invalid", "everything of node b.invalid"} <= set(reasons)
    findings = json.loads(held["report/doctor.json"])["findings"]
    assert {one["node"] for one in findings if one["level"] == "refuse"} == {"a.invalid", "b.invalid"}
    assert b"step 3 failed" in held["report/build-logs/build-x.log"]
    plain = gzip.decompress((tmp_path / "r.tar.gz").read_bytes())
    for secret in [*PLANTED.values(), KEY, "AAAAplanted"]:
        assert secret.encode() not in plain and secret not in done.stdout + done.stderr
    again = run(tmp_path, "--nodes", "a.invalid", "--out", "r.tar.gz")
    assert again.returncode == ExitCode.USAGE and "is there already" in again.stderr


def test_an_invalid_recipe_is_told_with_its_faults(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("recipe: 1\nname: bad\nmodle: x\nserve: {env: {MY_TOKEN: leaked-in-a-recipe}}\n")
    made = report.Report(Redactor())
    report.gather(made, str(recipe), (), [], {"spark1": KitError("nothing answers ssh there")}, 10)
    faults = json.loads(made.members["recipe-faults.json"])
    assert "unknown key modle" in json.dumps(faults)
    assert b"leaked-in-a-recipe" not in b"".join(made.members.values())
    assert b"name: bad" in made.members["recipe-as-written.yaml"]
    assert any("nothing answers ssh" in one["why"] for one in made.left_out)


def test_names_of_secrets() -> None:
    secret = (
        "HF_TOKEN",
        "api_key",
        "x-api-key",
        "MY_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "accessToken",
        "githubToken",
        "Cookie",
    )
    assert all(redaction.is_secret_name(name) for name in secret)
    plain: tuple[Any, ...] = ("max_tokens", "api_key_file", "SECRET_FILE", "tokens_per_s", "tiktoken", "keys", "PATH")
    assert not any(redaction.is_secret_name(name) for name in plain)
