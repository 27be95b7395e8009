"""Containers of deployments on one engine: made from a rendered compose file, found by their labels, taken down again.

The kit needs no compose program on any machine (Debian 12 has none that reads these files): it reads the file it
rendered and asks the engine for exactly that. A key that it does not know is refused, so file and container cannot
drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import yaml

from exl3kit import render
from exl3kit.deployment import LABEL, Deployment
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from docker.models.containers import Container
    from docker.types import HostConfig

    from exl3kit.nodes import Node

GONE_SECONDS = 10.0  # for a removal that is under way


@dataclass(frozen=True)
class Standing:
    """A container of a deployment as the engine has it; `state` is docker's word (running, exited, created, ...)."""

    node: Node
    container: Container

    def label(self, key: str) -> str:
        return str(self.container.labels.get(LABEL + key, ""))

    @property
    def deployment(self) -> str:
        return self.label("deployment")

    @property
    def rank(self) -> int:
        return int(self.label("rank") or 0)

    @property
    def state(self) -> str:
        return str(self.container.status)

    @property
    def exit_code(self) -> int:
        return int(self.container.attrs["State"]["ExitCode"])

    @property
    def has_gpu(self) -> bool:
        return bool(self.container.attrs["HostConfig"].get("DeviceRequests"))

    @property
    def restarts(self) -> int:
        """How often the engine has started it again by itself."""
        return int(self.container.attrs.get("RestartCount") or 0)

    @property
    def health(self) -> str | None:
        """Docker's word for the health check's verdict (starting, healthy, unhealthy)."""
        health = self.container.attrs["State"].get("Health")
        return str(health["Status"]) if health else None


# From the file to the engine ------------------------------------------------------------------------------------------


def services(compose_text: str) -> dict[str, dict[str, Any]]:
    """Services of a rendered file by name, with compose's `$$` read as `$`."""
    document = yaml.safe_load(compose_text)
    return {name: _undoubled(service) for name, service in document["services"].items()}


def _undoubled(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, list):
        return [_undoubled(item) for item in value]
    if isinstance(value, dict):
        return {key: _undoubled(item) for key, item in value.items()}
    return value


def creation(service: Mapping[str, Any], env: Mapping[str, str], network: str, version: str) -> dict[str, Any]:
    """Arguments of `APIClient.create_container` that mean what the service means.

    Parameters
    ----------
    service: one service of a rendered compose file.
    env: what its `env_file` holds.
    network: the project's bridge network, used when the service names one.
    version: API version of the engine.

    Raises `ValueError` for a key that it does not know.
    """
    from docker.types import EndpointConfig, NetworkingConfig

    rest = dict(service)
    for told_elsewhere in ("pull_policy", "env_file"):  # created, never run: nothing is pulled; env is given
        rest.pop(told_elsewhere)
    networks = rest.pop("networks", None)
    ports = rest.pop("ports", [])
    made: dict[str, Any] = {
        "image": rest.pop("image"),
        "name": rest.pop("container_name"),
        "entrypoint": rest.pop("entrypoint"),
        "command": rest.pop("command"),
        "environment": dict(env),
        "labels": rest.pop("labels"),
        "user": rest.pop("user"),
        "hostname": rest.pop("hostname", None),
        "stop_timeout": seconds(rest.pop("stop_grace_period")),
        "healthcheck": health_check(rest.pop("healthcheck")),
        "ports": [port.rpartition(":")[2] for port in ports],
        "networking_config": None,
    }
    if networks is not None:
        endpoint = EndpointConfig(version, aliases=[made["hostname"]])
        made["networking_config"] = NetworkingConfig({network: endpoint})  # type: ignore[arg-type]  # the stub is wrong
        rest["network_mode"] = network
    made["host_config"] = host_config(rest, ports, version)
    return made


def host_config(rest: dict[str, Any], ports: Iterable[str], version: str) -> HostConfig:
    """The engine's HostConfig of what is left of a service; empties `rest` or raises `ValueError`."""
    from docker.types import HostConfig, LogConfig, Mount, Ulimit

    bindings: dict[int | str, Any] = {}
    for port in ports:
        address, outside, inside = port.rsplit(":", 2)
        bindings[inside] = (address, int(outside))
    log = rest.pop("logging")
    config = HostConfig(
        version,
        network_mode=rest.pop("network_mode"),
        port_bindings=bindings or None,
        init=rest.pop("init"),
        read_only=rest.pop("read_only"),
        cap_drop=rest.pop("cap_drop"),
        cap_add=rest.pop("cap_add", None),
        security_opt=rest.pop("security_opt"),
        ipc_mode=rest.pop("ipc"),
        shm_size=rest.pop("shm_size"),
        tmpfs=dict(entry.split(":", 1) for entry in rest.pop("tmpfs")),
        mounts=[Mount(v["target"], v["source"], type=v["type"], read_only=v["read_only"]) for v in rest.pop("volumes")],
        devices=rest.pop("devices", None),
        ulimits=[Ulimit(name=name, soft=limit, hard=limit) for name, limit in rest.pop("ulimits", {}).items()],
        device_requests=device_requests(rest.pop("deploy", None)),
        restart_policy={"Name": rest.pop("restart")},
        log_config=LogConfig(type=log["driver"], config=log["options"]),
    )
    if rest:
        raise ValueError(f"the kit cannot start a service with {', '.join(sorted(rest))}")
    return config


def device_requests(deploy: Mapping[str, Any] | None) -> list[Any] | None:
    """Compose's device reservations as the engine's requests: a count (-1 is all), or the names of CDI devices."""
    from docker.types import DeviceRequest

    if deploy is None:
        return None
    wanted = deploy["resources"]["reservations"]["devices"]
    return [
        DeviceRequest(driver=one["driver"], device_ids=one["device_ids"])
        if "device_ids" in one
        else DeviceRequest(
            driver=one["driver"],
            count=-1 if one["count"] == "all" else one["count"],
            capabilities=[one["capabilities"]],
        )
        for one in wanted
    ]


def health_check(check: Mapping[str, Any]) -> dict[str, Any]:
    """A compose health check in the engine's units, nanoseconds."""
    times = {key: seconds(check[key]) * 10**9 for key in ("interval", "timeout", "start_period")}
    return {"test": check["test"], "retries": check["retries"], **times}


def seconds(text: str) -> int:
    """`30s` as 30."""
    return int(text.removesuffix("s"))


# On an engine ---------------------------------------------------------------------------------------------------------


@contextmanager
def answering(node: Node) -> Iterator[None]:
    """Turn a link or an engine that goes away during a call into a `KitError` (unreachable) that names the node."""
    from docker.errors import APIError
    from requests import RequestException

    try:
        yield
    except APIError:
        raise  # the engine did answer; what its answer means is the caller's to say
    except (RequestException, OSError) as error:
        raise node.error(
            "the engine no longer answers",
            why=" ".join(str(error).split())[:200],
            next_step="look at the node's link and its engine, then run the command again",
        ) from error


def create(node: Node, deployment: Deployment) -> list[Standing]:
    """Create (not start) the ranks of one node, and their network when they share one.

    Raises `KitError` when the engine refuses.
    """
    from docker.errors import APIError, ImageNotFound

    api = node.engine.api
    described = services(render.compose(deployment, node.name))
    made = []
    try:
        if deployment.bridge:
            labels = {LABEL + "deployment": deployment.name, LABEL + "generation": deployment.generation}
            node.engine.networks.create(deployment.project, driver="bridge", labels=labels, check_duplicate=True)
        for rank in deployment.on(node.name):
            node.engine.volumes.create(rank.volume, labels={LABEL + "deployment": deployment.name})
            version = str(api.api_version)
            arguments = creation(described[rank.service], rank.env, deployment.project, version)
            made.append(Standing(node, node.engine.containers.get(api.create_container(**arguments)["Id"])))
    except ImageNotFound as error:
        raise node.error(
            f"the image {deployment.image} is gone", next_step="run the command again", code=ExitCode.PREFLIGHT
        ) from error
    except APIError as error:
        raise refusal(node, deployment, error) from error
    return made


def start(standing: Standing, deployment: Deployment) -> None:
    """Start one created rank; a refusal of the engine (port, GPU, mount) is a `KitError`."""
    from docker.errors import APIError

    try:
        standing.container.start()
    except APIError as error:
        raise refusal(standing.node, deployment, error) from error


_REFUSALS = (
    ("port is already allocated", "port {port} is in use", "stop what uses it, or `--set serve.port=...`"),
    ("address already in use", "port {port} is in use", "stop what uses it, or `--set serve.port=...`"),
    ("could not select device driver", "the engine has no GPU to give", "install nvidia-container-toolkit on the node"),
    ("is already in use by container", "another container has the name", "`docker rm` it, or rename the recipe"),
    ("no space left on device", "the disk is full", "free space below the engine's data folder on the node"),
    ("bind source path does not exist", "the model's folder is gone", "run the command again"),
)


def refusal(node: Node, deployment: Deployment, error: Exception) -> KitError:
    """The sentence for an engine that refused to create or start a rank."""
    said = " ".join(str(getattr(error, "explanation", None) or error).split())
    for sign, what, next_step in _REFUSALS:
        if sign in said:
            what = what.format(port=deployment.port)
            return node.error(what, why=f"the engine says: {said}", next_step=next_step, code=ExitCode.PREFLIGHT)
    return node.error("the engine refuses to start a rank", why=said, code=ExitCode.SERVING)


def find(nodes: Iterable[Node], deployment: str | None = None, generation: str | None = None) -> list[Standing]:
    """Every container of a deployment (or of any) on the nodes, by name and rank, also stopped ones."""
    wanted = [f"{LABEL}deployment={deployment}" if deployment else f"{LABEL}deployment", f"{LABEL}rank"]
    if generation is not None:
        wanted.append(f"{LABEL}generation={generation}")
    found: dict[str, Standing] = {}
    for node in nodes:
        with answering(node):
            listed = node.engine.containers.list(all=True, filters={"label": wanted}, ignore_removed=True)
        for container in listed:
            found.setdefault(str(container.id), Standing(node, container))  # two names may lead to one engine
    return sorted(found.values(), key=lambda standing: (standing.deployment, standing.rank))


def look_again(one: Standing) -> None:
    """Read the container's state anew; one that is gone is a `KitError` (serving)."""
    from docker.errors import NotFound

    try:
        with answering(one.node):
            one.container.reload()
    except NotFound as error:
        what = f"{one.container.name} was removed by somebody else"
        raise one.node.error(what, code=ExitCode.SERVING) from error


def last_exit_code(one: Standing) -> int | None:
    """The exit code with which a container last ended, also when its engine has started it again (None: forgotten).

    The engine keeps the code of a container that runs nowhere but in its events.
    """
    if one.state not in ("running", "restarting"):
        return one.exit_code
    with answering(one.node):
        engine = one.node.engine
        now = int(datetime.fromisoformat(engine.info()["SystemTime"][:19] + "+00:00").timestamp())  # the node's clock
        wanted = {"container": one.container.id, "event": "die"}
        told = engine.events(since=now - 3600, until=now + 1, filters=wanted, decode=True)
        codes = [int(event["Actor"]["Attributes"]["exitCode"]) for event in told]
    return codes[-1] if codes else None


def require_own_names(nodes: Iterable[Node], deployment: Deployment) -> None:
    """Refuse when a container that is not the deployment's has one of its names, as of a recipe `a.b` beside `a-b`.

    Raises `KitError` (preflight) that names the other.
    """
    wanted = {rank.container: rank.node for rank in deployment.ranks}
    for node in nodes:
        with answering(node):
            listed = node.engine.containers.list(all=True, filters={"name": deployment.project}, ignore_removed=True)
        for container in listed:
            owner = container.labels.get(LABEL + "deployment")
            if wanted.get(str(container.name)) == node.name and owner != deployment.name:
                raise node.error(
                    f"the container {container.name} is not of {deployment.name}",
                    why=f"it is of the deployment {owner}" if owner else "the kit did not make it",
                    next_step=f"`kit down {owner}`, or rename the recipe"
                    if owner
                    else "remove it, or rename the recipe",
                    code=ExitCode.PREFLIGHT,
                )


def take_down(
    nodes: Iterable[Node],
    deployment: str,
    *,
    generation: str | None = None,
    grace: int = render.GRACE_S,
    volumes: bool = False,
) -> list[str]:
    """Stop and remove a deployment's containers and networks on every node, and `volumes` when told; gives their names.

    All ranks are told at once: the others compute until the head has answered what it has (`exl3_vllm.supervisor`). One
    that is told alone would end its gang, and the rest would start anew. A node that fails does not keep the others
    from being cleared.

    Raises `KitError`: unreachable for a node that does not answer, serving when something is still there afterwards.
    """
    nodes = {node.engine_url: node for node in nodes}.values()  # `local,local` is one engine
    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        clearings = [pool.submit(clear, node, deployment, generation, grace) for node in nodes]
        if volumes:
            wait(clearings)
            clearings += [pool.submit(remove_volumes, node, deployment) for node in nodes]
    failures = [error for clearing in clearings if (error := clearing.exception()) is not None]
    if failures:
        raise failures[0]
    return sorted({name for clearing in clearings for name in clearing.result()})


def clear(node: Node, deployment: str, generation: str | None, grace: int) -> list[str]:
    """Remove a deployment's containers and networks from one node; returns the containers' names."""
    standing = find([node], deployment, generation)
    with answering(node):
        with ThreadPoolExecutor(max_workers=max(1, len(standing))) as pool:
            list(pool.map(lambda one: remove(one, grace), standing))
        for network in node.engine.networks.list(filters={"label": f"{LABEL}deployment={deployment}"}):
            if generation is None or network.attrs["Labels"].get(LABEL + "generation") == generation:
                network.remove()
    for left in find([node], deployment, generation):
        raise node.error(
            f"{left.container.name} is still there after it was removed",
            next_step=f"`docker rm -f {left.container.name}` on the node",
            code=ExitCode.SERVING,
        )
    return [str(one.container.name) for one in standing]


def remove_volumes(node: Node, deployment: str) -> list[str]:
    """Remove what the ranks kept for their next start (compile caches, post-mortems); gives the volumes' names."""
    with answering(node):
        found = node.engine.volumes.list(filters={"label": f"{LABEL}deployment={deployment}"})
        for volume in found:
            volume.remove(force=True)
    return [str(volume.name) for volume in found]


def remove(standing: Standing, grace: int) -> None:
    """Stop one container, killing it after `grace` seconds, and remove it; one that is already gone is fine.

    Raises `KitError` (serving) when the engine refuses.
    """
    from docker.errors import APIError, NotFound

    try:
        if standing.state == "running":
            standing.container.stop(timeout=grace)
        standing.container.remove(force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if "already in progress" in str(error):  # somebody else removes it too, or the engine still does
            wait_gone(standing)
            return
        raise standing.node.error(
            f"the engine does not remove {standing.container.name}", why=str(error.explanation), code=ExitCode.SERVING
        ) from error


def wait_gone(standing: Standing) -> None:
    """Wait until the container is gone, at most `GONE_SECONDS`; whether it is, the caller looks at."""
    from docker.errors import NotFound

    deadline = time.monotonic() + GONE_SECONDS
    try:
        while time.monotonic() < deadline:
            standing.container.reload()
            time.sleep(0.2)
    except NotFound:
        return


def tail(standing: Standing, lines: int = 15) -> list[str]:
    """The last lines of a container's log, stderr and stdout as they came."""
    text: bytes = standing.container.logs(tail=lines)
    return text.decode("utf-8", "replace").splitlines()
