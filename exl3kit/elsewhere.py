"""A deployment for other tools than the kit: plain `docker run`, and a LeaderWorkerSet for Kubernetes.

Pure. Both are drawn from the same ranks as the compose files, so argv, environment and what a rank may do are the same.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exl3kit import deployment as plans
from exl3kit import render
from exl3kit.errors import KitError

if TYPE_CHECKING:
    from exl3kit.deployment import Deployment, Rank

ENTRYPOINT = ["python3", "-m", "exl3_vllm.rank"]
GROUP = "leaderworkerset.x-k8s.io"
POD_ADDRESS = "VLLM_HOST_IP"


def docker_run(deployment: Deployment, rank: Rank) -> list[str]:
    """Argv that starts one rank as its compose file does; its env file lies in the current folder."""
    argv = ["docker", "run", "--detach", "--name", rank.container, "--init", "--pull", "never"]
    argv += ["--user", f"{plans.USER}:{plans.USER}", "--read-only", "--cap-drop", "ALL"]
    argv += ["--security-opt", "no-new-privileges:true", "--ipc", "private", "--shm-size", str(render.SHM_BYTES)]
    argv += ["--tmpfs", "/tmp:size=1g,mode=1777", "--tmpfs", f"{plans.RUN_DIR}:size=16m,mode=1777"]
    argv += ["--env-file", f"{rank.service}.env", "--restart", "always", "--stop-timeout", str(render.GRACE_S)]
    for key, value in deployment.labels(rank).items():
        argv += ["--label", f"{key}={value}"]
    argv += mount("bind", rank.model_dir, plans.MODEL_DIR, read_only=True)
    argv += mount("volume", rank.volume, plans.STATE_DIR, read_only=False)
    for source, target in ((rank.api_key_file, plans.KEY_FILE), (rank.secret_file, plans.SECRET_FILE)):
        if source:
            argv += mount("bind", source, target, read_only=True)
    if deployment.rdma:
        argv += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"]
    if deployment.gpu:
        argv += ["--device", "nvidia.com/gpu=all"] if rank.cdi else ["--gpus", "all"]
        argv += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
    argv += ["--health-cmd", shlex.join([*ENTRYPOINT, "--health"]), "--health-interval", "10s"]
    argv += ["--health-timeout", "10s", "--health-retries", "3", "--health-start-period", f"{render.START_PERIOD_S}s"]
    argv += ["--log-opt", "max-size=10m", "--log-opt", "max-file=3"]
    if deployment.bridge:
        argv += ["--network", deployment.project, "--hostname", rank.service, "--network-alias", rank.service]
        argv += ["--publish", f"{deployment.publish}:{deployment.port}:{deployment.port}"] if rank.is_head else []
    else:
        argv += ["--network", "host"]
    return [*argv, "--entrypoint", ENTRYPOINT[0], deployment.image, *ENTRYPOINT[1:], "--", *rank.argv]


def mount(kind: str, source: str, target: str, *, read_only: bool) -> list[str]:
    """A mount of `docker run`; its field is CSV, so a source with a comma is quoted."""
    fields = [f"type={kind}", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
    quoted = ['"' + one.replace('"', '""') + '"' if re.search(r'[,"]', one) else one for one in fields]
    return ["--mount", ",".join(quoted)]


def docker_files(deployment: Deployment) -> dict[str, str]:
    """`<node>/run.sh` and the env files: a script of plain lines, for each node."""
    written = {}
    for node in deployment.nodes:
        ranks = deployment.on(node)
        lines = [
            "#!/bin/sh",
            f"# {deployment.name} on {node}: the head's node first. Needs the image {deployment.image},",
        ]
        lines += [f"# the model, and the files of the mounts below, readable by user {plans.USER}.", "set -eu"]
        lines.append('cd "$(dirname "$0")"')
        if deployment.bridge:
            lines.append(shlex.join(["docker", "network", "create", deployment.project]))
        lines += [shlex.join(docker_run(deployment, rank)) for rank in ranks]
        written[f"{node}/run.sh"] = "\n".join(lines) + "\n"
        for rank in ranks:
            written[f"{node}/{rank.service}.env"] = env_file(rank.env)
    return written


def env_file(env: Mapping[str, str]) -> str:
    """An env file as `docker run` reads it: values as they are, where compose would have some in quotes.

    Raises `KitError` for a value of several lines.
    """
    for name, value in env.items():
        render.env_value(name, value)
    return "".join(f"{name}={env[name]}\n" for name in sorted(env))


def leader_worker_set(deployment: Deployment, image: str, claim: str) -> dict[str, Any]:
    """The manifest of a gang on Kubernetes: one group of pods, of which the leader has the API.

    Parameters
    ----------
    image: the same image under the name that the cluster's nodes can pull it by.
    claim: a PersistentVolumeClaim with the model, readable from all pods.

    LeaderWorkerSet gives each pod its index and the leader's address; the group is made anew when a pod ends.
    Raises `KitError` (usage) for a deployment of ranks on one engine: their names are the bridge's.
    """
    if deployment.is_gang and deployment.bridge:
        raise KitError(
            "these ranks share one machine, and Kubernetes gives each its own pod",
            where=deployment.name,
            next_step="name as many nodes as the recipe has",
        )
    head, workers = deployment.ranks[0], deployment.ranks[1:]
    spec: dict[str, Any] = {
        "size": len(deployment.ranks),
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": {"metadata": {"labels": {"role": "leader"}}, "spec": pod(deployment, head, image, claim)},
        "workerTemplate": {"spec": pod(deployment, workers[0] if workers else head, image, claim)},
    }
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": dns_name(deployment.name), "annotations": {plans.LABEL + "stamp": deployment.stamp}},
        "spec": {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": spec},
    }


def pod(deployment: Deployment, rank: Rank, image: str, claim: str) -> dict[str, Any]:
    """One pod: the rank's container with the same rights, its place taken from LeaderWorkerSet's variables."""
    volumes: list[dict[str, Any]] = [
        {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(render.SHM_BYTES)}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "model", "mountPath": plans.MODEL_DIR, "readOnly": True},
        {"name": "state", "mountPath": plans.STATE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "run", "mountPath": plans.RUN_DIR},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for volume, key, path in secrets_of(deployment, rank):
        mounts.append({"name": volume, "mountPath": path, "subPath": key, "readOnly": True})
        secret = {"secretName": dns_name(deployment.name), "defaultMode": 0o440}
        volumes.append({"name": volume, "secret": secret})
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if deployment.rdma else {})},
    }
    container: dict[str, Any] = {
        "name": "rank",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ENTRYPOINT,
        "args": ["--", *placed(deployment, rank)],
        "env": variables(deployment, rank),
        "securityContext": security,
        "volumeMounts": mounts,
        "startupProbe": probe(failures=render.START_PERIOD_S // 10),
        "livenessProbe": probe(failures=3),
    }
    if rank.is_head:
        container["ports"] = [{"containerPort": deployment.port, "name": "api"}]
    if deployment.gpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(workers(deployment))}}
    user = {"runAsUser": plans.USER, "runAsGroup": plans.USER, "runAsNonRoot": True, "fsGroup": plans.USER}
    return {
        "containers": [container],
        "volumes": volumes,
        "securityContext": user,
        "terminationGracePeriodSeconds": render.GRACE_S,
        "automountServiceAccountToken": False,
        "hostNetwork": deployment.rdma,
    }


def workers(deployment: Deployment) -> int:
    """GPUs of each pod: the ranks of vLLM that share one container."""
    argv = deployment.ranks[0].argv
    sizes = [argv[argv.index(one) + 1] for one in ("--tensor-parallel-size", "--pipeline-parallel-size") if one in argv]
    return math.prod(map(int, sizes)) // len(deployment.ranks)


def placed(deployment: Deployment, rank: Rank) -> list[str]:
    """The rank's argv with what Kubernetes knows in the place of what this machine's nodes said."""
    argv = list(rank.argv)
    for option, value in (("--master-addr", "$(LWS_LEADER_ADDRESS)"), ("--node-rank", "$(LWS_WORKER_INDEX)")):
        if option in argv:
            argv[argv.index(option) + 1] = value
    return [word if word.startswith("$(LWS_") else word.replace("$(", "$$(") for word in argv]


def variables(deployment: Deployment, rank: Rank) -> list[dict[str, Any]]:
    """The rank's environment; addresses, rank and peers are the pods' own, NCCL's names those of no node."""
    dropped = ("EXL3_PEERS", "EXL3_RANK", POD_ADDRESS)
    told: list[dict[str, Any]] = [
        {"name": POD_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "EXL3_RANK", "value": "$(LWS_WORKER_INDEX)"},
    ]
    if deployment.is_gang:
        told.append({"name": "EXL3_PEERS", "value": ",".join(peers(deployment))})
    for name, value in sorted(rank.env.items()):
        of_a_node = name.startswith(("NCCL_IB_", "NCCL_SOCKET_", "GLOO_SOCKET_"))
        if name not in dropped and not of_a_node:
            told.append({"name": name, "value": value.replace("$(", "$$(")})
    return told


def peers(deployment: Deployment) -> list[str]:
    """Address and port of every rank's supervisor: LeaderWorkerSet's names of the pods in its headless service."""
    name = dns_name(deployment.name)
    pods = [f"{name}-0", *(f"{name}-0-{number}" for number in range(1, len(deployment.ranks)))]
    return [f"{pod}.{name}:{deployment.gang_port}" for pod in pods]


def secrets_of(deployment: Deployment, rank: Rank) -> list[tuple[str, str, str]]:
    """Volume, key in the Secret `<name>`, and place of each secret that a rank reads."""
    wanted = [("gang", "gang", plans.SECRET_FILE)] if rank.secret_file else []
    return wanted + ([("api-key", "api_key", plans.KEY_FILE)] if rank.api_key_file else [])


def probe(*, failures: int) -> dict[str, Any]:
    command = {"command": [*ENTRYPOINT, "--health"]}
    return {"exec": command, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": failures}


def dns_name(name: str) -> str:
    """A name that Kubernetes takes: letters, digits and '-', at most 53 (it adds an index)."""
    return re.sub(r"[^a-z0-9-]+", "-", name).strip("-")[:53].rstrip("-") or "exl3"
