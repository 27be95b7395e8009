"""The whole rig: up, down, status, and what its users need to know about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import cgroups, host, network, node
from .plan import GATEWAY, NETWORK, OWN_FOLDER, Node, Options, State, cache_dir
from .shell import USAGE, RigError, run
from .template import Template, cache_lock, operator_template

NONE_UP = "no rig is up: run `rig up`."
TEMPLATE_GB = 0.8  # what one template takes while it is made


def load(state: State) -> Options | None:
    """The options of the rig that is up; None when none is."""
    return Options.from_json(json.loads(state.file.read_text())) if state.file.exists() else None


def up(options: Options, state: State, need_gb: float, install: bool) -> str:
    """Bring the rig up and return what was done; nothing when the same rig is up already.

    Raises:
        RigError: when the machine lacks something, another rig is up, or a node does not come. What had been made by
            then is taken down again.
    """
    host.need_root()
    with cache_lock():
        running = load(state)
        if running:
            if differences := running.differences(options):
                raise RigError(f"a rig is up that differs in {'; '.join(differences)}. Run `rig down` first.", USAGE)
            return "already up"
        if network.exists() or network.namespaces():
            raise RigError("parts of an earlier rig are still here: run `rig down` first.", USAGE)
        templates = {operator_template(), Template(options.release, options.engine)}
        _prepare(templates, options, need_gb, install)
        try:
            _make(options, state)
        except BaseException:
            with suppress(RigError):  # the first trouble is the one to tell; `down` tells of this one
                _remove(options, state)
            raise
        return "up"


def _prepare(templates: set[Template], options: Options, need_gb: float, install: bool) -> None:
    missing = [t for t in templates if not t.exists()]
    host.need_programs(template_missing=bool(missing), install=install)
    host.need_disk(cache_dir() / "templates", TEMPLATE_GB * len(missing))
    host.need_disk(Path(options.disk_dir), need_gb)
    host.need_ground_for_overlays(Path(options.disk_dir))
    for template in missing:
        template.make()


def _make(options: Options, state: State) -> None:
    state.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    state.file.write_text(json.dumps(options.to_json(), indent=1))  # first of all, so that `down` knows the disks
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "exl3kit-rig", "-f", str(state.identity))
    network.create_bridge()
    network.forward(state.folder / "forwarding", options.nat)
    network.open_firewall(options.nat)
    for each in options.node_list():
        node.make_disk(each, options, state)
        network.connect(each, twin=options.fake_gpu)
        node.start(each, options)
    _write_operator_side(options, state)
    for each in options.node_list():
        node.wait(each, options)


def _write_operator_side(options: Options, state: State) -> None:
    """The ssh configuration, and a docker client with buildx and compose from the template."""
    tools = operator_template().folder
    plugins = state.docker_config / "cli-plugins"
    plugins.mkdir(parents=True)
    state.bin.mkdir()
    (state.docker_config / "config.json").write_text("{}\n")
    for plugin in ("docker-buildx", "docker-compose"):
        (plugins / plugin).symlink_to(tools / "usr/libexec/docker/cli-plugins" / plugin)
    (state.bin / "docker").symlink_to(tools / "usr/bin/docker")
    if not options.engine:
        return
    state.known_hosts.write_text("".join(node.host_key(n, options) for n in options.node_list()))
    hosts = [f"Host {n.name}\n  HostName {n.address}\n" for n in options.node_list()]
    state.ssh_config.write_text(
        "".join(hosts) + f"Host {' '.join(options.nodes)}\n"
        "  User root\n"
        f"  IdentityFile {state.identity}\n"
        "  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {state.known_hosts}\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n"
    )


def down(state: State) -> str:
    """Take down whatever is up, also what a crash left; nothing when there is nothing."""
    host.need_root()
    with cache_lock():
        _remove(load(state), state)
    return "down"


def _remove(options: Options | None, state: State) -> None:
    """Undo `_make` and whatever happened since. Every step runs, also after one that failed.

    Raises:
        RigError: with all that went wrong; the state is kept then, so that `down` can be tried again.
    """
    disks = Path(options.disk_dir) if options else default_disk_dir()
    steps: list[Callable[[], None]] = [
        lambda: node.kill(None),
        lambda: node.kill_all(network.namespace_processes()),
        network.close_firewall,
        lambda: network.stop_forwarding(state.folder / "forwarding"),
        network.remove,
        cgroups.remove,
        lambda: _remove_disks(disks),
    ]
    troubles = []
    for step in steps:
        try:
            step()
        except (RigError, OSError) as error:
            troubles.append(str(error))
    if troubles:
        raise RigError(f"the rig is not all gone, run `rig down` again: {'; '.join(troubles)}")
    run("rm", "-rf", str(state.folder))


def _remove_disks(disks: Path) -> None:
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        if line.split()[4].startswith(f"{disks}/"):
            run("umount", line.split()[4])
    run("rm", "-rf", "--one-file-system", str(disks))


def default_disk_dir() -> Path:
    return cache_dir() / "disks" / OWN_FOLDER


def status(state: State) -> dict[str, Any]:
    """Everything that a user or a test needs, as `rig status --json` prints it."""
    host.need_root()
    options = load(state)
    if options is None:
        return {"up": False, "state_dir": str(state.folder)}
    return {
        "up": True,
        "state_dir": str(state.folder),
        "network": NETWORK,
        "gateway": GATEWAY,
        "ssh_config": str(state.ssh_config) if options.engine else None,
        "known_hosts": str(state.known_hosts) if options.engine else None,
        "identity": str(state.identity) if options.engine else None,
        "docker": str(state.bin / "docker"),
        "docker_config": str(state.docker_config),
        "template": options.template,
        "options": options.to_json(),
        "nodes": [_node_status(n, options) for n in options.node_list()],
    }


def _node_status(each: Node, options: Options) -> dict[str, Any]:
    return {
        "name": each.name,
        "address": each.address,
        "power": "on" if node.init_pid(each) else "off",
        "link": network.link_state(each),
        "engine": node.engine_version(each),
        "engine_socket": node.engine_socket(each),
        "namespace": each.namespace,
        "disk": str(node.Disk.of(each, options).folder),
        "engine_log": str(node.Disk.of(each, options).upper / "var/log/dockerd.log"),
    }


def environment(state: State) -> dict[str, str]:
    """What to set so that ssh users of the kit, docker, buildx and compose work on the rig.

    Raises:
        RigError: when no rig is up.
    """
    host.need_root()
    if load(state) is None:
        raise RigError(NONE_UP, USAGE)
    return {
        "EXL3KIT_SSH_CONFIG": str(state.ssh_config),
        "DOCKER_CONFIG": str(state.docker_config),
        "PATH": f"{state.bin}:$PATH",
    }


def find(state: State, name: str) -> tuple[Node, Options]:
    """A node of the rig by its name.

    Raises:
        RigError: when no rig is up, or it has no such node.
    """
    host.need_root()
    options = load(state)
    if options is None:
        raise RigError(NONE_UP, USAGE)
    for each in options.node_list():
        if each.name == name:
            return each, options
    raise RigError(f"the rig has no node {name!r}: its nodes are {', '.join(options.nodes)}.", USAGE)
