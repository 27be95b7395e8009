"""Post-mortems: what the supervisor of each rank wrote of the gang's last death, from its container or kept after it.

A rank writes `post-mortem.json` into its state volume, which the engine can be asked for whether the container runs or
not. `kit down` also writes it into the kit's folder on the node; `--volumes` removes the volume, and leaves that file.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from exl3kit import containers
from exl3kit.deployment import STATE_DIR
from exl3kit.errors import KitError
from exl3kit.faults import printable

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.nodes import Node

FILE = "post-mortem.json"
_WHOLE = re.compile(r"exl3 rank \d+: EXL3-POST-MORTEM ")  # begins the line of a log that holds the whole of it

# $1 is the deployment, $2 the file's name; the text comes on stdin.
_KEEP = 'd="${XDG_CACHE_HOME:-$HOME/.cache}/exl3kit/deployments/$1" && mkdir -p "$d" && cat > "$d/$2"'
_READ = 'cat "${XDG_CACHE_HOME:-$HOME/.cache}/exl3kit/deployments/$1"/post-mortem-rank*.json 2>/dev/null'


def is_whole(line: str) -> bool:
    """Whether this line of a rank's log is a whole post-mortem: 10 kB of JSON, for programs."""
    return _WHOLE.match(line) is not None


def of(one: Standing) -> dict[str, Any] | None:
    """The post-mortem in a container, running or not; None when its gang has not died."""
    from docker.errors import APIError, NotFound

    try:
        with containers.answering(one.node):
            stream, _ = one.container.get_archive(f"{STATE_DIR}/{FILE}")
            data = b"".join(stream)
    except (NotFound, APIError):  # no such file, or a volume that was removed by hand
        return None
    with suppress(tarfile.TarError, ValueError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.next()
        file = archive.extractfile(member) if member is not None else None
        found = json.loads(file.read()) if file is not None else None
        return found if isinstance(found, dict) else None
    return None


def keep(standing: Sequence[Standing]) -> int:
    """Write every post-mortem into the kit's folder on its node; gives how many there were.

    A node that has no room for it, or no longer answers, does not keep a deployment from being taken down.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(standing))) as pool:
        return sum(pool.map(keep_one, standing))


def keep_one(one: Standing) -> bool:
    with suppress(KitError):
        found = of(one)
        if found is not None:
            argv = ["sh", "-c", _KEEP, "sh", one.deployment, f"post-mortem-rank{one.rank}.json"]
            return one.node.run(argv, input=json.dumps(found, indent=1)).returncode == 0
    return False


def kept(nodes: Iterable[Node], deployment: str) -> list[dict[str, Any]]:
    """The post-mortems that `keep` left on the nodes."""
    found = []
    for node in nodes:
        text = node.run(["sh", "-c", _READ, "sh", deployment]).stdout.lstrip()
        decoder = json.JSONDecoder()
        with suppress(ValueError):
            while text:
                one, end = decoder.raw_decode(text)
                found.append(one)
                text = text[end:].lstrip()
    return found


def newest(nodes: Sequence[Node], deployment: str) -> dict[str, Any] | None:
    """The newest post-mortem of a deployment on the nodes: of its containers, or what `keep` left there.

    Every rank writes one about the same death; the one that heard from most ranks is given.
    """
    found = [told for one in containers.find(nodes, deployment) if (told := of(one)) is not None]
    return choose([*found, *kept(nodes, deployment)])


def choose(found: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Of what several ranks wrote, the newest death, as told by the rank that heard from most."""
    return max(
        found,
        key=lambda told: (told["deployment_generation"], told["incarnation"], len(told["records"])),
        default=None,
    )


def as_lines(told: Mapping[str, Any]) -> list[str]:
    """A post-mortem for people: who died first and why, then of every rank what it said and its last words."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["written"]))
    first = told["first"]
    whole = first["process"] == "rank"  # its sentence names it
    who = f"rank {first['rank']}" + ("" if whole else f", {first['process'] or 'its supervisor'}")
    lines = [
        f"{when}, generation {told['deployment_generation']}, incarnation {told['incarnation']}",
        f"first: {who}: {first['sentence']}",
    ]
    for rank, record in sorted(told["records"].items(), key=lambda item: int(item[0])):
        how = record.get("signal") or (None if record.get("exit_code") is None else f"exit code {record['exit_code']}")
        lines.append(f"rank {rank}: {record['sentence']}" + (f" ({how})" if how else ""))
        memory = record.get("memory") or {}
        if memory.get("available") is not None:
            pressure = memory.get("psi_some_avg10")
            more = f", pressure {pressure} %" if pressure is not None else ""
            lines.append(
                f"  memory: {memory['available'] / (1 << 30):.1f} GiB free{more}, oom kills {memory.get('oom_kills')}"
            )
        if record.get("since_progress_s") is not None:
            lines.append(f"  last progress {record['since_progress_s']:.1f} s before")
        lines += [f"  | {printable(line)}" for line in record.get("lines") or ()]
    lines += [f"rank {rank}: said nothing more" for rank in told["missing"]]
    return lines
