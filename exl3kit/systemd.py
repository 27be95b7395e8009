"""A deployment as systemd units: per node a unit that runs the node's compose file, for those who prefer units.

Pure, but for the gang's secret, which is a new one each time.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import jinja2

from exl3kit import paths, render
from exl3kit.deployment import USER, Deployment

TEMPLATE = "node.service.j2"
FOLDER = "/etc/exl3kit"  # on a node; each deployment has its own below it
UNITS = "/etc/systemd/system"


@dataclass(frozen=True)
class Install:
    """A file of the export and where it goes on its node."""

    file: str  # below the node's folder of the export
    target: str
    mode: str
    owner: str = "root"


def unit_name(deployment: Deployment) -> str:
    return f"{deployment.project}.service"


def folder(deployment: Deployment) -> str:
    """Where the compose file lies on a node."""
    return f"{FOLDER}/{deployment.name}"


def unit(deployment: Deployment, node: str) -> str:
    """The unit of one node."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.REPO / "compose"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # this is no markup, and every value of a machine goes through the filter below
    )
    environment.filters["unit_word"] = word
    return environment.get_template(TEMPLATE).render(
        deployment=deployment,
        node=node,
        ranks=deployment.on(node),
        folder=folder(deployment),
        file=render.COMPOSE_FILE,
        grace_s=render.GRACE_S,
    )


def word(text: str) -> str:
    """One word of a unit: `%` and `$` mean something to systemd, blanks and quotes need quoting."""
    escaped = text.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if all(character.isalnum() or character in "_./:,+-@=%$\\" for character in escaped):
        return escaped
    return '"' + escaped.replace('"', '\\"') + '"'


def files(deployment: Deployment) -> dict[str, str]:
    """Every file of the export, `<node>/<name>` -> text; the gang's secret is new and the same on all nodes."""
    written = render.files(deployment)
    secret = secrets.token_hex(32) + "\n"
    for node in deployment.nodes:
        written[f"{node}/{unit_name(deployment)}"] = unit(deployment, node)
        if any(rank.secret_file for rank in deployment.on(node)):
            written[f"{node}/gang_secret"] = secret
    return written


def installs(deployment: Deployment, node: str) -> list[Install]:
    """Which file goes where on a node, and who may read it."""
    ranks = deployment.on(node)
    listed = [
        Install(render.COMPOSE_FILE, f"{folder(deployment)}/{render.COMPOSE_FILE}", "644"),
        *(Install(f"{rank.service}.env", f"{folder(deployment)}/{rank.service}.env", "600") for rank in ranks),
        Install(unit_name(deployment), f"{UNITS}/{unit_name(deployment)}", "644"),
    ]
    for path in sorted({rank.secret_file for rank in ranks if rank.secret_file}):
        listed.append(Install("gang_secret", path, "400", str(USER)))
    return listed


def steps(deployment: Deployment) -> dict[str, list[list[str]]]:
    """Commands that install and start the export, per node, as root there, after its folder was copied to it."""
    told = {}
    for node in deployment.nodes:
        argvs = [
            ["install", "-D", "-m", one.mode, "-o", one.owner, one.file, one.target]
            for one in installs(deployment, node)
        ]
        told[node] = [*argvs, ["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", unit_name(deployment)]]
    return told
