"""The container entry point as a real process: what it starts, forwards, reaps, writes and answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
ENTRY_POINT = "[vllm.general_plugins]\nexl3 = exl3_vllm:register\n"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of rank 0 with the plugin installed, as the kit renders it, on folders of the test."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    info = tmp_path / "site" / "exl3_vllm-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exl3-vllm\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (tmp_path / "run").mkdir()
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{REPO / 'overlay'}:{tmp_path / 'site'}",
        "EXL3_RANK": "0",
        "EXL3_GENERATION": "g1",
        "EXL3_MODEL_DIR": str(model),
        "EXL3_RUN_DIR": str(tmp_path / "run"),
        "EXL3_STATE_DIR": str(tmp_path / "state"),
        "EXL3_API": "http://127.0.0.1:1",
    }


def begin(environ: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "exl3_vllm.rank", *arguments]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def rank(environ: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    return end(begin(environ, *arguments))


def python(program: str) -> list[str]:
    return ["--", sys.executable, "-c", program]


def wait_for(path: Path, text: str = "") -> str:
    for _ in range(800):
        if path.exists() and text in path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} never held {text!r}")


def status(environ: dict[str, str]) -> dict[str, Any]:
    return dict(json.loads((Path(environ["EXL3_RUN_DIR"]) / "status.json").read_text()))


def test_argv_reaches_the_program_word_for_word(environ: dict[str, str]) -> None:
    words = ['{"method": "mtp"}', "a b", "$HOME", "", "'\"`", "*"]
    code, out, _ = rank(environ, *python("import json,sys; print(json.dumps(sys.argv[1:])); sys.exit(9)"), *words)
    assert (code, json.loads(out)) == (9, words)


@pytest.mark.parametrize(
    ("program", "code", "sentence"),
    [
        ("pass", 1, "ended by itself with status 0"),  # vLLM's rank 0 does this after its peer has died
        ("raise SystemExit(7)", 7, "by itself with status 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "signal SIGKILL"),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_failure(
    environ: dict[str, str], program: str, code: int, sentence: str
) -> None:
    got, _, err = rank(environ, *python(program))
    assert got == code
    assert sentence in err
    assert status(environ)["exit_code"] == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_forwarded_and_ends_with_0(environ: dict[str, str], number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import pathlib,signal,sys\n"
        f"seen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "def told(number, frame): seen.write_text('TERM'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "seen.write_text('up'); signal.pause()"
    )
    process = begin(environ, *python(program))
    wait_for(tmp_path / "seen", "up")
    process.send_signal(number)
    code, _, err = end(process)
    assert (code, (tmp_path / "seen").read_text()) == (0, "TERM")
    assert "this container was told to stop" in err


def test_a_program_that_ignores_the_stop_is_killed_with_its_children(environ: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import os,pathlib,signal,subprocess,sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid)); signal.pause()"
    )
    process = begin({**environ, "EXL3_GRACE_S": "1"}, *python(program))
    child = int(wait_for(tmp_path / "child"))
    process.terminate()
    code, _, err = end(process)
    assert code == 0
    assert "told to stop" in err
    assert gone(child)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()


def test_orphans_are_collected_and_ended_with_the_rank(environ: dict[str, str], tmp_path: Path) -> None:
    """Given a grandchild whose parent has gone, then the rank inherits it: no zombie, and none left at the end."""
    program = (
        "import os,pathlib,subprocess,time\n"
        "if os.fork() == 0:\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    pathlib.Path({str(tmp_path / 'orphan')!r}).write_text(str(child.pid)); os._exit(0)\n"
        "time.sleep(600)"
    )
    process = begin({**environ, "EXL3_GRACE_S": "1"}, *python(program))
    orphan = int(wait_for(tmp_path / "orphan"))
    time.sleep(0.5)
    process.terminate()
    end(process)
    assert gone(orphan)


def test_a_supervisor_that_hangs_is_ended_by_its_guard_with_a_report(environ: dict[str, str], tmp_path: Path) -> None:
    process = begin(environ, *python("import time; time.sleep(600)"))
    wait_for(Path(environ["EXL3_RUN_DIR"]) / "status.json", "starting")
    supervisor = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    vllm = status(environ)["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    code, _, err = end(process)
    assert code == 1
    assert "gave no sign of life" in err
    assert gone(vllm)
    report = json.loads((tmp_path / "state" / "post-mortem.json").read_text())
    assert (report["first"]["kind"], report["first"]["process"]) == ("hung", "supervisor")


def test_a_supervisor_that_is_killed_is_reported_by_its_guard(environ: dict[str, str], tmp_path: Path) -> None:
    process = begin(environ, *python("import time; time.sleep(600)"))
    wait_for(Path(environ["EXL3_RUN_DIR"]) / "status.json", "starting")
    supervisor = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(supervisor, signal.SIGKILL)
    code, _, err = end(process)
    assert code == 137
    assert "the supervisor was killed by SIGKILL" in err
    first = json.loads((tmp_path / "state" / "post-mortem.json").read_text())["first"]
    assert (first["kind"], first["rank"]) == ("supervisor", 0)
    os.kill(status(environ)["pid"], signal.SIGKILL)  # which ends with the container otherwise


def test_a_container_that_was_killed_says_so_when_it_is_back(environ: dict[str, str], tmp_path: Path) -> None:
    process = begin(environ, *python("import time; time.sleep(600)"))
    wait_for(Path(environ["EXL3_RUN_DIR"]) / "status.json", "starting")
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()  # with all its processes, as when the power goes
    for pid in [*map(int, below), status(environ)["pid"]]:
        os.kill(pid, signal.SIGKILL)
    end(process)
    _, _, err = rank(environ, *python("raise SystemExit(3)"))
    assert "the container was killed while the rank ran" in err
    kept = sorted(path.name for path in (tmp_path / "state").glob("post-mortem-*.json"))
    assert kept == ["post-mortem-000001.json", "post-mortem-000002.json"]


def test_failed_starts_are_paced(environ: dict[str, str]) -> None:
    """Given three starts in a row that came to nothing, then the next waits, longer each time, and says so."""
    for expected in ("", "", "2 failed starts in a row, the next in 2 s"):
        begun = time.monotonic()
        code, _, err = rank(environ, *python("raise SystemExit(7)"))
        assert (code, expected in err) == (7, True)
    assert time.monotonic() - begun > 2
    remembered = Path(environ["EXL3_STATE_DIR"]) / "gang.json"
    remembered.write_text(json.dumps({**json.loads(remembered.read_text()), "failures": 9}))
    process = begin(environ, *python("raise SystemExit(7)"))
    wait_for(Path(environ["EXL3_RUN_DIR"]) / "status.json", "backing-off")
    assert rank(environ, "--health")[1] == "9 failed starts in a row, the next in 60 s\n"
    process.terminate()
    assert end(process)[0] == 0


def test_the_program_starts_with_default_signal_handling(environ: dict[str, str]) -> None:
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, [])); raise SystemExit(3)"
    code, out, _ = rank(environ, *python(program))
    assert (code, out.strip()) == (3, "set()")


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"EXL3_RANK": None}, 2, "EXL3_RANK is not set"),
        ({"EXL3_RANK": "one"}, 2, "EXL3_RANK='one' is not a number"),
        ({"VLLM_PLUGINS": "other"}, 3, "leaves out 'exl3'"),
        ({"VLLM_PLUGINS": ""}, 3, "leaves out 'exl3'"),
        ({"PYTHONPATH": str(REPO / "overlay")}, 5, "no 'exl3' in the entry points"),
        ({"EXL3_MODEL_DIR": "/nowhere"}, 3, "no model directory at /nowhere"),
        ({"EXL3_API_KEY_FILE": "/nowhere/key"}, 3, "cannot read the API key"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    environ: dict[str, str], change: dict[str, str | None], code: int, sentence: str
) -> None:
    changed = {name: value for name, value in {**environ, **change}.items() if value is not None}
    got, out, err = rank(changed, *python("print('started')"))
    assert (got, out) == (code, "")
    assert sentence in err
    assert "Traceback" not in err


def test_a_dangling_link_and_an_unreadable_folder_are_refused(environ: dict[str, str]) -> None:
    model = Path(environ["EXL3_MODEL_DIR"])
    (model / "model.safetensors").symlink_to("blobs/gone")
    code, _, err = rank(environ, *python("print('started')"))
    assert code == 3
    assert "model.safetensors is a link to nothing" in err


def test_the_api_key_reaches_vllm_and_no_argv_or_log(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame-123\n")
    program = "import os; print(os.environ['VLLM_API_KEY'], open('/proc/self/cmdline').read()); raise SystemExit(4)"
    code, out, err = rank({**environ, "EXL3_API_KEY_FILE": str(tmp_path / "key")}, *python(program))
    assert code == 4
    assert out.split(" ", 1)[0] == "sesame-123"
    assert "sesame" not in out.split(" ", 1)[1] + err


def test_vllms_head_is_started_behind_the_gate_and_with_a_key_behind_the_guard(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sesame-123\n")
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "told: $@"\nexit 4\n')
    program.chmod(0o755)
    argv = ["--", str(program), "serve", "/model"]
    guarded = rank({**environ, "EXL3_API_KEY_FILE": str(tmp_path / "key")}, *argv)[1]
    gated = "told: serve /model --middleware exl3_vllm.api_gate.ApiGate"
    assert f"{gated} --middleware exl3_vllm.api_guard.KeyGuard\n" in guarded
    assert f"{gated}\n" in rank(environ, *argv)[1]


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "os.kill(os.getpid(), 9)"])
def test_a_server_that_somebody_told_to_stop_is_named_for_it(environ: dict[str, str], end: str) -> None:
    """Whatever ends then: vLLM kills its engine itself."""
    said = "(APIServer pid=9) INFO [launcher.py:1] [shutdown] API server: shutdown triggered"
    code, _, err = rank(environ, *python(f"import os; print({said!r}, flush=True); {end}"))
    report = json.loads((Path(environ["EXL3_STATE_DIR"]) / "post-mortem.json").read_text())
    assert (code, report["first"]["process"], report["first"]["kind"]) == (1, "API server", "exit")
    assert "API server was told to stop, not by its supervisor" in err


ANSWERING = """if True:  # a server with one request inside, which it answers for as long as it was told
    import os, pathlib, signal, sys, time
    from exl3_vllm import api_gate
    run = pathlib.Path(os.environ["EXL3_RUN_DIR"])
    signal.signal(signal.SIGTERM, lambda *_: print("told to stop", flush=True) or sys.exit(0))
    inside = api_gate.Presence(api_gate.open_present(run), api_gate.INSIDE)
    inside.enter()
    print("closed" if (run / "closed").exists() else "open", flush=True)
    while not (run / "closed").exists():
        time.sleep(0.02)
    time.sleep(float(sys.argv[1]))
    print("answered", flush=True)
    inside.leave()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("seconds", "said"), [("1", ["open", "answered", "told to stop"]), ("50", ["open"])], ids=["soon", "too late"]
)
def test_vllm_is_told_to_stop_once_the_last_answer_is_out(
    environ: dict[str, str], seconds: str, said: list[str]
) -> None:
    """Given a request inside and a gate left closed, then the gate is opened at the start, and the end awaits it."""
    (Path(environ["EXL3_RUN_DIR"]) / "closed").touch()
    process = begin(environ, *python(ANSWERING), seconds)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    process.terminate()
    begun = time.monotonic()
    code, out, _ = end(process)
    assert (code, ["open", *out.split("\n")[:-1]]) == (0, said)
    assert time.monotonic() - begun < 10  # what is too late has no more than the grace: 2 s before the first token


@pytest.fixture
def api() -> Iterator[tuple[str, dict[str, Any]]]:
    """A small HTTP server in the place of vLLM's: (its URL, what it was asked and is to answer)."""
    told: dict[str, Any] = {"health": 200}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            told["asked"] = told.get("asked", 0) + 1
            bodies = {"/v1/models": '{"data": [{"id": "m"}]}', "/metrics": told.get("metrics", "")}
            self.answer(told["health"], bodies.get(self.path, "").encode())

        def do_POST(self) -> None:
            told["body"] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told["key"] = self.headers.get("Authorization")
            self.answer(200, b'{"choices": [{"text": "4"}]}')

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", told
    server.shutdown()
    server.server_close()


def test_the_head_is_healthy_once_it_gave_a_token(
    environ: dict[str, str], api: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, told = api
    head = {**environ, "EXL3_API": url}
    assert rank(head, "--health")[:2] == (1, "the supervisor has not started yet\n")
    told["health"] = 503
    process = begin(head, *python("import time; time.sleep(600)"))
    wait_for(Path(environ["EXL3_RUN_DIR"]) / "status.json", "starting")
    assert rank(head, "--health")[:2] == (1, "starting\n")
    told["health"] = 200
    wait_for(Path(environ["EXL3_RUN_DIR"]) / "status.json", "serving")
    assert "no receipt" in rank(head, "--health")[1]
    (Path(environ["EXL3_RUN_DIR"]) / "receipts" / "rank0.json").write_text('{"rank": 0}')
    assert rank(head, "--health")[:2] == (0, "healthy\n")
    told["health"] = 503
    assert rank(head, "--health")[0] == 1

    report = json.loads(rank(head, "--report")[1])
    assert (report["receipts"], report["generation"], report["incarnation"]) == ([{"rank": 0}], "g1", 1)
    assert report["post_mortem"] is None
    assert "503" in report["unhealthy"]

    os.kill(report["pid"], signal.SIGKILL)
    assert end(process)[0] == 137
    code, out, _ = rank(head, "--health")
    assert code == 1
    assert "SIGKILL" in out
    assert json.loads(rank(head, "--report")[1])["post_mortem"]["first"]["process"] == "API server"


def test_requests_that_wait_while_nothing_moves_end_the_rank(
    environ: dict[str, str], api: tuple[str, dict[str, Any]]
) -> None:
    url, told = api
    told["metrics"] = 'vllm:num_requests_running{engine="0"} 1\nvllm:generation_tokens_total{engine="0"} 5\n'
    begun = time.monotonic()
    code, _, err = rank({**environ, "EXL3_API": url, "EXL3_STALL_S": "3"}, *python("import time; time.sleep(600)"))
    assert code == 7
    assert time.monotonic() - begun < 30
    assert re.search(r"requests that wait: 1, and nothing has moved for [3-9] s", err)


def test_a_start_that_gives_no_token_has_an_end(environ: dict[str, str]) -> None:
    code, _, err = rank({**environ, "EXL3_START_S": "1"}, *python("import time; time.sleep(600)"))
    assert code == 7
    assert "no token within 1 s" in err


def test_ask_waits_for_the_api_and_brings_the_key(
    environ: dict[str, str], api: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, told = api
    (tmp_path / "key").write_text("sesame-123\n")
    told["health"] = 503
    request = {"path": "/v1/completions", "body": {"prompt": "2+2="}, "wait_s": 10, "timeout_s": 10}
    process = begin(
        {**environ, "EXL3_API": url, "EXL3_API_KEY_FILE": str(tmp_path / "key")}, "--ask", json.dumps(request)
    )
    while not told.get("asked"):
        time.sleep(0.05)
    time.sleep(0.5)
    told["health"] = 200
    answer = json.loads(end(process)[1])
    assert (answer["status"], answer["answer"]["choices"][0]["text"]) == (200, "4")
    assert answer["waited"] > 0.4
    assert (told["body"], told["key"]) == ({"prompt": "2+2="}, "Bearer sesame-123")


def test_ask_gives_up_at_its_deadline_and_says_why(environ: dict[str, str]) -> None:
    request = {"path": "/v1/completions", "body": {}, "wait_s": 0.5, "timeout_s": 1}
    answer = json.loads(rank(environ, "--ask", json.dumps(request))[1])
    assert answer["status"] == 0
    assert "no /health within" in answer["answer"]


def test_usage(environ: dict[str, str]) -> None:
    code, _, err = rank(environ)
    assert code == 2
    assert "usage:" in err


def test_what_the_build_found_out_is_laid_where_vllm_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "overlay")
    from exl3_vllm.own_cache import use_own_cache
    from exl3_vllm.rank_settings import Settings

    (tmp_path / "built" / "modelinfos").mkdir(parents=True)
    (tmp_path / "built" / "modelinfos" / "a.json").write_text("{}")
    (tmp_path / "built" / "modelinfos" / "a.json").chmod(0o444)
    names = {"EXL3_RANK": "0", "EXL3_GENERATION": "g", "EXL3_SPEC": "f" * 64, "EXL3_API": "x"}
    settings = Settings.from_environ({**names, "EXL3_MODEL_DIR": "/m", "EXL3_RUN_DIR": "/r"})
    other = tmp_path / "cache" / "of another spec"
    other.mkdir(parents=True)
    got = use_own_cache({"VLLM_CACHE_ROOT": str(tmp_path / "cache")}, settings, tmp_path / "built")
    own = Path(got["VLLM_CACHE_ROOT"])
    assert own == tmp_path / "cache" / ("f" * 12)
    assert os.access(own / "modelinfos" / "a.json", os.W_OK)
    assert not other.exists()
    use_own_cache({"VLLM_CACHE_ROOT": "/proc/nowhere"}, settings, tmp_path / "built")  # it starts later, and starts
    assert use_own_cache({}, settings, tmp_path / "built") == {}
