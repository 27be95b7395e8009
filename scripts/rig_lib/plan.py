"""Names, addresses and folders of a rig. Pure data: nothing here touches the machine."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

NUMBER = int(os.environ.get("EXL3KIT_RIG") or 0)  # rigs of different numbers stand side by side
PREFIX = f"exl3rig{NUMBER}"  # of every namespace, interface and control group that a rig makes; `down` finds them by it
BRIDGE = f"{PREFIX}br"
SUBNET = f"10.77.{NUMBER}"
NETWORK = f"{SUBNET}.0/24"
GATEWAY = f"{SUBNET}.254"
OWN_FOLDER = f"exl3kit-rig-{NUMBER}" if NUMBER else "exl3kit-rig"


@dataclass(frozen=True)
class Node:
    """One host of the rig; `index` counts from 1 and is the last byte of its address."""

    name: str
    index: int

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.index}"

    @property
    def twin_address(self) -> str:
        """Of the second cable that a node with `--fake-gpu` has."""
        return f"10.78.{NUMBER}.{self.index}"

    @property
    def twin_veth(self) -> str:
        """The bridge's end of the second cable; the node's end is called eth1."""
        return f"{PREFIX}t{self.index}"

    @property
    def namespace(self) -> str:
        return f"{PREFIX}-{self.name}"

    @property
    def veth(self) -> str:
        """The bridge's end of the node's network cable; the node's end is called eth0."""
        return f"{PREFIX}n{self.index}"


@dataclass(frozen=True)
class Options:
    """What `up` was asked for. Two rigs with equal options are the same rig."""

    nodes: tuple[str, ...]
    release: str
    engine: bool
    nat: bool
    data_mb: int | None
    binds: tuple[str, ...]
    disk_dir: str
    template: str
    fake_gpu: bool = False

    def node_list(self) -> list[Node]:
        return [Node(name, index) for index, name in enumerate(self.nodes, start=1)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        return cls(**{**data, "nodes": tuple(data["nodes"]), "binds": tuple(data["binds"])})

    def differences(self, other: Options) -> list[str]:
        """`name: this != that` for every option in which two rigs differ."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name}: {mine!r}, asked for {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


def default_state_dir() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / OWN_FOLDER


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exl3kit" / "rig"


@dataclass(frozen=True)
class State:
    """The folder with everything that an operator of the rig needs; gone after `down`."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "state.json"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def identity(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def docker_config(self) -> Path:
        return self.folder / "docker"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"
