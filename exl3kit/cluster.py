"""Which machines: `--nodes a,b`, a cluster file, or `local`.

```yaml
cluster: 1
nodes:
  - {name: spark1, ssh: admin@spark1.lan, address: 10.10.0.1}     # address: on the fabric
  - {name: spark2, ssh: spark2, address: 10.10.0.2, engine: /run/user/1000/docker.sock}
```
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from exl3kit.errors import KitError

LOCAL = "local"
ENGINE_SOCKET = "/var/run/docker.sock"

# A destination that starts with '-' would be read by ssh as an option.
_DESTINATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*")
_FILE_ENDINGS = (".yaml", ".yml")


class Host(BaseModel):
    """One machine as the operator names it; nothing was asked of it yet."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}$")]
    ssh: Annotated[str, Field(pattern=rf"^{_DESTINATION.pattern}$")] | None = None
    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]+$")] | None = None
    engine: Annotated[str, Field(pattern=r"^/[^:]+$")] = ENGINE_SOCKET

    @property
    def is_local(self) -> bool:
        """Whether this is the machine the kit runs on, reached without ssh."""
        return self.ssh is None


class Cluster(BaseModel):
    """A cluster file, schema 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cluster: Literal[1]
    nodes: Annotated[list[Host], Field(min_length=1, max_length=64)]


def is_file(named: str) -> bool:
    """Whether `--nodes` names a cluster file, whose nodes' names are no ssh names."""
    return named.endswith(_FILE_ENDINGS)


def hosts(named: str) -> list[Host]:
    """The hosts of `--nodes`: a cluster file's (by its ending `.yaml`), or comma-separated ssh names and `local`.

    Raises `KitError` for a name that cannot be one, a name given twice, and a file that is not a cluster file.
    """
    if is_file(named):
        return _unique(_read(Path(named)).nodes, where=named)
    names = [name.strip() for name in named.split(",")]
    return _unique([_host(name, named) for name in names], where=f"--nodes {named}")


def _host(name: str, named: str) -> Host:
    if name == LOCAL:
        return Host(name=LOCAL)
    if not _DESTINATION.fullmatch(name):
        raise KitError(
            f"{name!r} is no name of a node" if name else "a name of a node is empty",
            where=f"--nodes {named}",
            next_step="give ssh names separated by commas, `local` for this machine, or a cluster file ending in .yaml",
        )
    return Host(name=re.sub(r"[^A-Za-z0-9_.@-]", "_", name)[:63], ssh=name)


def _unique(listed: list[Host], *, where: str) -> list[Host]:
    """`local` may stand several times (ranks sharing this machine: local, local-2, ...); another name only once."""
    seen: dict[str, int] = {}
    result = []
    for host in listed:
        seen[host.name] = seen.get(host.name, 0) + 1
        if seen[host.name] == 1:
            result.append(host)
        elif host.is_local:
            result.append(host.model_copy(update={"name": f"{host.name}-{seen[host.name]}"}))
        else:
            raise KitError(f"node {host.name} is named twice", where=where, next_step="name every node once")
    return result


def _read(path: Path) -> Cluster:
    where = str(path)
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Cluster.model_validate(data)
    except OSError as error:
        raise KitError("the cluster file cannot be read", where=where, why=error.strerror) from error
    except yaml.YAMLError as error:
        raise KitError("the cluster file is not YAML", where=where, why=str(error).replace("\n", " ")) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise KitError(
            f"{key or 'the file'}: {first['msg'].lower()}",
            where=where,
            next_step="a cluster file is {cluster: 1, nodes: [{name: ..., ssh: ..., address: ...}]}",
        ) from error
