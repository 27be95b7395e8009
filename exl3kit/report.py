"""The report: what others need to help, gathered from this machine and the nodes, without secrets, as one archive.

Nothing here may fail because something is broken, for then a report is wanted most: what cannot be had is left out,
and the archive says why.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import __version__, paths, redaction
from exl3kit.errors import ExitCode, KitError
from exl3kit.faults import printable

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.nodes import Node
    from exl3kit.recipes import Effective

FOLDER = "report"
TAIL = 500  # lines of each rank's log
OWN_LOGS: dict[str, tuple[Callable[[], Path], int]] = {  # folder in the archive: where they are, how many of the newest
    "build-logs": (lambda: paths.cache_dir("logs"), 5),
    "crashes": (lambda: paths.cache_dir("crashes"), 5),
    "runs": (lambda: paths.state_dir("runs"), 10),
}
OWN_LOG_BYTES = 400_000  # of the end of each

ABOUT = """\
What kit report gathered {when}, with kit {version}.

Secrets were masked as {mask} before anything was written ({masked} places). Host names, addresses and log lines are in
it: look through it before you send it. Nothing on any machine was changed.

{contents}

Left out
{left_out}
"""


@dataclass
class Report:
    """Members of the archive by name, each with what it is; what was left out, with the reason."""

    redactor: redaction.Redactor
    members: dict[str, bytes] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def add_text(self, name: str, what: str, text: str) -> None:
        self.members[name] = self.redactor.text(text).encode("utf-8", "replace")
        self.says[name] = what

    def add_public(self, name: str, what: str, text: str) -> None:
        """Versions and hashes of public things: `base-passwd` is a package there, and no secret."""
        self.members[name] = text.encode()
        self.says[name] = what

    def add_data(self, name: str, what: str, data: Any) -> None:
        plain = json.loads(json.dumps(data, default=str))
        text = json.dumps(self.redactor.data(plain), indent=1, sort_keys=True, ensure_ascii=False)
        self.members[name] = (text + "\n").encode("utf-8", "replace")
        self.says[name] = what

    def leave_out(self, what: str, why: str) -> None:
        told = self.redactor.text(why).replace("\n  next: ", "; next: ")
        self.left_out.append({"what": self.redactor.text(what), "why": printable(told, 2000)})

    def attempt(self, what: str, gather: Callable[..., None], *arguments: Any) -> None:
        """Gather one part by `gather(self, *arguments)`; what is in the way becomes a line of what was left out."""
        try:
            gather(self, *arguments)
        except KitError as error:
            self.leave_out(what, str(error))
        except Exception as error:  # a broken part is what a report is for
            self.leave_out(what, f"{type(error).__name__}: {error}")


def known_secrets(key_file: Path | None) -> list[str]:
    """What is secret on this machine and may turn up: variables with a secret's name, tokens and keys in files."""
    from exl3kit import hub

    found = [value.strip() for name, value in os.environ.items() if redaction.is_secret_name(name)]
    with suppress(KitError):
        found.append(hub.token(None) or "")
    if key_file is not None:
        with suppress(OSError, ValueError):
            found.append(key_file.read_text(encoding="utf-8").strip())
    return found


def home() -> tuple[str, str]:
    """The user's home folder and name, for `Redactor(home=...)`."""
    try:
        return str(Path.home()), getpass.getuser()
    except (OSError, KeyError, RuntimeError):
        return "", ""


def gather(
    report: Report,
    recipe: str | None,
    sets: Sequence[str],
    nodes: Sequence[Node],
    missing: Mapping[str, KitError],
    tail: int,
) -> None:
    """Fill the report with all that can be had.

    Parameters
    ----------
    recipe: as given on the command line; its faults are told when it has some.
    nodes, missing: those that could be opened, and why the others could not.
    tail: lines of each rank's log.
    """
    report.attempt("kit.json", add_kit)
    effective = load(report, recipe, sets) if recipe else None
    if effective is not None:
        report.attempt("recipe.yaml", add_recipe, effective)
        report.attempt("lock.json", add_lock, effective)
    elif recipe is None:
        report.leave_out("recipe.yaml, lock.json", "no recipe was named")
    report.attempt("pins/", add_pins)
    for folder, (source, most) in OWN_LOGS.items():
        report.attempt(f"{folder}/", add_own_logs, folder, source, most)
    for name, error in missing.items():
        report.leave_out(f"everything of node {name}", str(error))
    report.attempt("doctor.json", add_doctor, effective, nodes, missing)
    if nodes:
        add_ranks(report, effective, nodes, missing, tail)


# ---- this machine ----------------------------------------------------------------------------------------------------


def add_kit(report: Report) -> None:
    """Version, commit and system."""
    about_it = {
        "kit": __version__,
        "commit": git("rev-parse", "HEAD"),
        "changed_files": (git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "python": sys.version,
        "system": platform.platform(),
        "machine": platform.machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    report.add_data("kit.json", "version, commit and system", about_it)


def git(*words: str) -> str | None:
    """What git says of the kit's checkout; None without git or a checkout."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["git", "-C", str(paths.REPO), *words], capture_output=True, text=True, timeout=10)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def load(report: Report, recipe: str, sets: Sequence[str]) -> Effective | None:
    """The recipe; of one that is invalid the report gets the faults and the file, and None is given."""
    from exl3kit import recipes

    try:
        return recipes.load_effective(recipe, list(sets))
    except KitError as error:
        report.leave_out("recipe.yaml, lock.json", str(error))
        report.add_data("recipe-faults.json", "why the recipe is invalid", error.as_json())
    with suppress(OSError):
        text = Path(recipe).read_text(encoding="utf-8", errors="replace")
        report.add_text("recipe-as-written.yaml", "the recipe that is invalid", text)
    return None


def add_recipe(report: Report, effective: Effective) -> None:
    from exl3kit import recipe_view

    text = recipe_view.as_yaml(effective)
    report.add_text("recipe.yaml", "the recipe with all values, and where each comes from", text)


def add_lock(report: Report, effective: Effective) -> None:
    from exl3kit import lock

    made = lock.make_lock(effective.recipe)
    report.add_public("lock.json", f"every input of its image, stamp {made.short}", json.dumps(made.data, indent=1))


def add_pins(report: Report) -> None:
    for file in sorted(paths.LOCKS.glob("*.json")):
        report.add_public(f"pins/{file.name}", "committed pins", file.read_text(encoding="utf-8"))


def add_own_logs(report: Report, folder: str, source: Callable[[], Path], most: int) -> None:
    """The newest logs of a folder of the kit's own, the end of each."""
    files = sorted(source().glob("*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[:most]:
        content = file.read_bytes()[-OWN_LOG_BYTES:]
        report.add_text(
            f"{folder}/{file.name}",
            f"of the newest {most} of the kit's own logs of this kind",
            content.decode("utf-8", "replace"),
        )
    if not files:
        report.leave_out(f"{folder}/", "there are none")


# ---- nodes -----------------------------------------------------------------------------------------------------------


def add_doctor(
    report: Report, effective: Effective | None, nodes: Sequence[Node], missing: Mapping[str, KitError]
) -> None:
    from exl3kit import doctor

    recipe = effective.recipe if effective else None
    found = doctor.examine(nodes, list(missing.values()), recipe, bandwidth=False)
    environment = {rank: [asdict(one) for one in told] for rank, told in found.settings.items()}
    findings = [asdict(one) for one in found.findings]
    report.add_data("doctor.json", "findings on every node", {"findings": findings, "environment": environment})


def add_ranks(
    report: Report,
    effective: Effective | None,
    nodes: Sequence[Node],
    missing: Mapping[str, KitError],
    tail: int,
) -> None:
    """Status, receipts, logs and post-mortems of what stands on the nodes."""
    from exl3kit import containers

    report.attempt("status.json", add_status, nodes, missing)
    standing: list[Standing] = []
    report.attempt("receipts.json, logs/", lambda _: standing.extend(containers.find(nodes)))
    if standing:
        report.attempt("receipts.json", add_receipts, standing)
    else:
        report.leave_out("receipts.json, logs/", "no rank was found on the nodes that answer")
    for one in standing:
        name = f"logs/{one.deployment}-rank{one.rank}-{one.node.name}.log"
        report.attempt(name, add_log, name, one, tail)
    deployments = {one.deployment for one in standing} | ({effective.recipe.name} if effective else set())
    for deployment in sorted(deployments):
        report.attempt(f"post-mortem/{deployment}.json", add_post_mortem, nodes, deployment)


def add_status(report: Report, nodes: Sequence[Node], missing: Mapping[str, KitError]) -> None:
    from exl3kit import status

    report.add_data("status.json", "what stands, and what ranks say of themselves", status.status(nodes, missing))


def add_receipts(report: Report, standing: Sequence[Standing]) -> None:
    from exl3kit import receipts

    running = [one for one in standing if one.state == "running"]
    if not running:
        report.leave_out("receipts.json", "no rank runs")
        return
    report.add_data("receipts.json", "what each running rank counted of itself", receipts.collect(running))


def add_log(report: Report, name: str, one: Standing, tail: int) -> None:
    from exl3kit import logs

    text = "".join(f"{line.stamp} {line.text}\n" for line in logs.lines([one], tail=tail))
    report.add_text(name, f"the last {tail} lines of rank {one.rank} on {one.node.name}", text)


def add_post_mortem(report: Report, nodes: Sequence[Node], deployment: str) -> None:
    from exl3kit import post_mortem

    found = post_mortem.newest(nodes, deployment)
    if found is None:
        report.leave_out(f"post-mortem/{deployment}.json", "no death is on record on the nodes that answer")
    else:
        report.add_data(f"post-mortem/{deployment}.json", "the newest death, as the ranks told it", found)


# ---- the archive -----------------------------------------------------------------------------------------------------


def write(report: Report, out: Path) -> int:
    """Write the archive, readable by its owner alone, whole or not at all; returns its size in bytes.

    Raises `KitError` (usage) when the file is there already or cannot be written.
    """
    content = archive(report)
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise KitError("the file is there already", where=str(out), next_step="name another with --out") from error
    except OSError as error:
        raise KitError("the report cannot be written", where=str(out), why=error.strerror) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        out.unlink(missing_ok=True)
        raise KitError(
            "the report cannot be written", where=str(out), why=error.strerror, code=ExitCode.PREFLIGHT
        ) from error
    return len(content)


def archive(report: Report) -> bytes:
    """The gzipped tar; owners and times of its members say nothing of this machine."""
    listed = [
        {"file": name, "what": report.says[name], "bytes": len(content)}
        for name, content in sorted(report.members.items())
    ]
    contents = {"files": listed, "left_out": report.left_out, "masked": report.redactor.count}
    members = {
        "README.txt": about(report).encode(),
        "contents.json": (json.dumps(contents, indent=1, ensure_ascii=False) + "\n").encode(),
        **dict(sorted(report.members.items())),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, content in members.items():
            member = tarfile.TarInfo(f"{FOLDER}/{report.redactor.text(name)}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            made.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def about(report: Report) -> str:
    """README.txt of the archive."""
    return ABOUT.format(
        when=time.strftime("on %Y-%m-%d at %H:%M UTC", time.gmtime()),
        version=__version__,
        mask=redaction.MASK,
        masked=report.redactor.count,
        contents="\n".join(lines((name, report.says[name]) for name in sorted(report.members))),
        left_out="\n".join(lines((one["what"], one["why"]) for one in report.left_out)) or "  nothing",
    )


def lines(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name}: {what}" for name, what in pairs]
