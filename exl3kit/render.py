"""Rendering: a deployment as files that run it, one compose file per node and one env file per rank.

Pure, but for `write`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import jinja2

from exl3kit import deployment as plans
from exl3kit import paths
from exl3kit.deployment import Deployment
from exl3kit.errors import KitError

TEMPLATE = "node.yaml.j2"
COMPOSE_FILE = "compose.yaml"
PRIVATE = ("gang_secret",)  # besides env files
SHM_BYTES = 1 << 30
GRACE_S = 30  # the head answers what it has for 20 s, and the other ranks compute for it until then
START_PERIOD_S = 1800  # loading 164 GiB from one disk takes this long; until then a rank is "starting", not unhealthy


def files(deployment: Deployment) -> dict[str, str]:
    """Every file of the deployment: `<node>/compose.yaml` and `<node>/rank<N>.env` -> text."""
    written = {}
    for node in deployment.nodes:
        written[f"{node}/{COMPOSE_FILE}"] = compose(deployment, node)
        for rank in deployment.on(node):
            written[f"{node}/{rank.service}.env"] = env_file(rank.env)
    return written


def compose(deployment: Deployment, node: str) -> str:
    """The compose file of one node."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.REPO / "compose"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # this is YAML, and every value goes through the filter below
    )
    environment.filters["yaml"] = scalar
    return environment.get_template(TEMPLATE).render(
        deployment=deployment,
        node=node,
        ranks=deployment.on(node),
        file=COMPOSE_FILE,
        user=plans.USER,
        model_dir=plans.MODEL_DIR,
        run_dir=plans.RUN_DIR,
        state_dir=plans.STATE_DIR,
        key_file=plans.KEY_FILE,
        secret_file=plans.SECRET_FILE,
        shm_size="1g",
        shm_bytes=SHM_BYTES,
        grace_s=GRACE_S,
        start_period_s=START_PERIOD_S,
    )


def scalar(value: str) -> str:
    """A string as a YAML scalar that neither YAML nor compose reads as anything else: quoted, and `$` doubled."""
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")


def env_file(env: Mapping[str, str]) -> str:
    """An env file that compose reads back as `env`.

    Raises `KitError` for a value that the format cannot carry.
    """
    return "".join(f"{name}={env_value(name, env[name])}\n" for name in sorted(env))


def env_value(name: str, value: str) -> str:
    """One value in compose's notation: bare when harmless, else in single quotes, else in double ones with escapes."""
    if "\n" in value or "\r" in value or "\0" in value:
        raise KitError(
            f"the value of {name} holds a line break, which an env file cannot carry",
            where="serve.env",
            next_step="write it as one line",
        )
    if value and all(character.isalnum() or character in "_./:,+-|@%=" for character in value):
        return value
    if "'" not in value and not value.endswith("\\"):
        return f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def write(deployment: Deployment, out: Path) -> list[Path]:
    """Write the files of a deployment below `out`; gives the paths written."""
    return write_files(files(deployment), out)


def write_files(texts: Mapping[str, str], out: Path) -> list[Path]:
    """Write texts by their names below `out`; env files and secrets are 0600 from the first byte on.

    Raises `KitError` when the folder cannot be written.
    """
    written = []
    try:
        for name, text in texts.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            private = path.suffix == ".env" or path.name in PRIVATE
            write_file(path, text, mode=0o600 if private else 0o644)
            written.append(path)
    except OSError as error:
        next_step = "give a directory that you may write with --out"
        raise KitError("cannot write the files", where=str(out), why=error.strerror, next_step=next_step) from error
    return written


def write_file(path: Path, text: str, *, mode: int) -> None:
    """Replace `path` in one step; the file has its mode before it has any content."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    beside.replace(path)
