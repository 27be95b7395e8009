"""Weights of a Hugging Face repository at one commit: where its cache has them, and how a node fetches them.

The download runs in the recipe's image on the node that is to have the files: the image has `huggingface_hub` anyway,
so the kit needs it nowhere else, and a slow workstation is not in the way. A token goes to the container as a file that
only its user can read; no argument, variable, label or log has it.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import node_files, run_log
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.progress import Stage

HUB_DIR = "/hub"  # where the container sees the node's cache
TOKEN_FILE = "/run/hub-token"
CA_FILE = "/etc/ssl/certs/ca-certificates.crt"  # of the node: a company's own certificates are in it
SILENT_SECONDS = 600.0  # the program tells every second what it has
PASSED_ON = ("HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")


def cache() -> Path:
    """The cache's folder on this machine."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def repository(repo: str) -> str:
    """The folder of a repository in the cache."""
    return f"models--{repo.replace('/', '--')}"


def snapshot(repo: str, revision: str) -> str:
    """The folder of one commit in the cache; its files are links into the repository's `blobs`."""
    return f"{repository(repo)}/snapshots/{revision}"


def token(file: Path | None) -> str | None:
    """The token in a file, else in HF_TOKEN, else in the file that `hf auth login` writes; None when there is none.

    Raises `KitError` (preflight) for a file that cannot be read or holds none.
    """
    if file is None:
        if os.environ.get("HF_TOKEN"):
            return run_log.keep_secret(os.environ["HF_TOKEN"].strip())
        file = Path(os.environ.get("HF_TOKEN_PATH") or cache().parent / "token")
        if not file.is_file():
            return None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise KitError("the token cannot be read", where=str(file), why=str(error), code=ExitCode.PREFLIGHT) from error
    if not text or not text.isprintable() or " " in text:
        raise KitError("this is no token: it is empty, or holds blanks", where=str(file), code=ExitCode.PREFLIGHT)
    return run_log.keep_secret(text)


def fetch(node: Node, facts: NodeFacts, image: str, repo: str, revision: str, secret: str | None, stage: Stage) -> str:
    """Fetch one commit into the node's cache; what is there already is not fetched again. Returns its folder.

    Raises `KitError`: preflight when the hub refuses or the disk is full, unreachable when the hub cannot be reached.
    """
    from exl3kit.aboard import hub_fetch

    assert facts.probe is not None
    hub = facts.probe.hub
    made = node.run(["mkdir", "-p", hub])
    if made.returncode != 0:
        raise node.error(f"cannot make {hub}", why=made.stderr.strip(), code=ExitCode.PREFLIGHT)
    argv = ["python3", "-I", "-c", inspect.getsource(hub_fetch), repo, revision, HUB_DIR, TOKEN_FILE]
    with container(node, facts, image, argv, hub, secret) as (api, name):
        api.start(name)
        outcome = follow(api.logs(name, stream=True, follow=True), stage)
        api.wait(name)
    if "error" in outcome:
        raise refusal(node, repo, revision, outcome, had_token=secret is not None)
    return f"{hub}/{snapshot(repo, revision)}"


@contextmanager
def container(
    node: Node, facts: NodeFacts, image: str, argv: list[str], hub: str, secret: str | None
) -> Iterator[tuple[Any, str]]:
    """A new container that may write to the node's cache as the node's user, and read the token; gone afterwards."""
    environment = {"HOME": "/tmp", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment["HF_HUB_OFFLINE"] = "0"  # the image says 1, for ranks that find their weights on the disk
    passed = PASSED_ON if node.is_local else PASSED_ON[:1]  # a proxy of this machine is none of the node's
    environment |= {name: os.environ[name] for name in passed if os.environ.get(name)}
    mounts = [node_files.mount(hub, HUB_DIR, read_only=False)]
    if node.run(["test", "-f", CA_FILE]).returncode == 0:
        mounts.append(node_files.mount(CA_FILE, CA_FILE, read_only=True))
        environment["SSL_CERT_FILE"] = CA_FILE
    with node.patient_engine(SILENT_SECONDS) as engine:
        host = engine.api.create_host_config(
            mounts=mounts, cap_drop=["ALL"], security_opt=["no-new-privileges:true"], network_mode="host"
        )
        made = {
            "entrypoint": argv[:1],
            "command": argv[1:],
            "user": f"{facts.uid}:{facts.gid}",
            "environment": environment,
            "host_config": host,
        }
        with node_files.helper(engine.api, image, made) as name:
            if secret is not None:
                text = secret.encode()
                parts = [node_files.entry(TOKEN_FILE.lstrip("/"), len(text), 0o400, facts.uid, facts.gid), text]
                engine.api.put_archive(name, "/", iter([*parts, node_files.padding(len(text)), node_files.END]))
            yield engine.api, name


def follow(stream: Iterator[bytes], stage: Stage) -> Mapping[str, Any]:
    """Tell the stage what the program tells; its last word."""
    outcome: dict[str, Any] = {"error": "ended", "says": "the program ended without a word"}
    rest = b""
    for chunk in stream:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            told = _told(line)
            if told is None:
                outcome = {"error": "failed", "says": line.decode("utf-8", "replace")[-300:]}
            elif "bytes" in told:
                stage.total = told["total"] or stage.total
                stage.advance(max(0, told["bytes"] - stage.done))
            else:
                outcome = told
    return outcome


def _told(line: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return None


def refusal(node: Node, repo: str, revision: str, outcome: Mapping[str, Any], *, had_token: bool) -> KitError:
    """The sentence for a download that did not come about."""
    kind, says = str(outcome["error"]), str(outcome.get("says", ""))
    code = ExitCode.PREFLIGHT
    again = "`kit weights fetch` goes on where this one stopped"
    if kind == "gated":
        what = f"{repo} is gated, and " + ("the token may not read it" if had_token else "no token was given")
        step = f"accept its terms at https://huggingface.co/{repo}, then `--token-file FILE` or HF_TOKEN"
    elif kind == "missing":
        what = f"the hub has no {repo} at {revision}, or does not show it to this token"
        step = "look at the recipe's model.repo and model.revision; a private one needs `--token-file FILE` or HF_TOKEN"
    elif kind == "space":
        what, step = "the disk is full", f"free space there; {again}"
    elif kind == "network":
        what, code = "the hub cannot be reached from there", ExitCode.UNREACHABLE
        step = f"look at the node's network and proxy; {again}"
    else:
        what, step = "the download failed", again
    return node.error(what, why=says or None, next_step=step, code=code)


def branches(repo: str) -> dict[str, str]:
    """Commit of each branch of a public repository, by name; raises `KitError` (unreachable)."""
    from urllib.request import urlopen

    address = f"https://huggingface.co/api/models/{repo}/refs"
    try:
        with urlopen(address, timeout=30) as answered:
            answer = json.load(answered)
        return {str(one["name"]): str(one["targetCommit"]) for one in answer["branches"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KitError(
            f"the branches of {repo} cannot be looked up",
            where=address,
            why=str(error) or type(error).__name__,
            next_step="write the 40 hex digits of a commit into model.revision by hand",
            code=ExitCode.UNREACHABLE,
        ) from error
