"""Deployment: which rank runs where, with which argv, environment and mounts.

Pure: a recipe, a stamp and the nodes' facts in, a plan out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from exl3kit import fabric
from exl3kit.errors import ExitCode, KitError
from exl3kit.words import counted

if TYPE_CHECKING:
    from exl3kit.probe import Probe
    from exl3kit.recipe import Recipe

LABEL = "io.exl3kit."
MODEL_DIR = "/model"  # where a container sees the weights
RUN_DIR = "/run/exl3"  # tmpfs: status and receipts of the running rank
STATE_DIR = "/var/lib/exl3"  # a volume: post-mortems and the compile cache outlive the container's restarts
KEY_FILE = "/run/secrets/api_key"
SECRET_FILE = "/run/secrets/gang"
DRAIN_S = 20  # for the requests in flight when a rank is told to stop
ASKED_BY_THE_KIT = ("/health", "/metrics")  # every second: not for the log
USER = 10001  # the image's unprivileged user and group


@dataclass(frozen=True)
class NodeFacts:
    """What a node says about itself; nothing here is ever a default or guessed."""

    name: str
    address: str  # on the fabric, a literal; loopback for this machine alone
    interface: str | None  # that carries the address
    own_name: tuple[str, ...]  # addresses that the node's own host name resolves to
    cpus: tuple[int, ...]  # that a process there may use
    engine: str  # id of its Docker engine: equal for two names of one node
    machine: str  # boot id: equal for two nodes that share one kernel, and so share the cores
    cache: str  # the kit's folder on the node
    uid: int
    gid: int
    probe: Probe | None = None  # all that was read of the node


@dataclass(frozen=True)
class Rank:
    """One container: a node rank of the gang (with several GPUs it runs several workers)."""

    rank: int
    node: str
    container: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    model_dir: str  # on the node
    api_key_file: str | None  # on the node
    secret_file: str | None  # on the node: what the ranks of a gang prove to each other that they know
    cdi: bool = False  # the node's engine hands out GPUs by CDI alone

    @property
    def service(self) -> str:
        return f"rank{self.rank}"

    @property
    def volume(self) -> str:
        """Name of the volume with the rank's state."""
        return f"{self.container}-state"

    @property
    def is_head(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Deployment:
    """A gang as it is to run."""

    name: str
    served_name: str
    image: str
    stamp: str
    generation: str
    spec: str  # digest of everything but the generation: equal means nothing to restart
    ranks: tuple[Rank, ...]
    bridge: bool  # all ranks on one engine, on a network of their own; else the hosts' network
    port: int
    rendezvous: int | None  # port of the head that the other ranks connect to, where it is a port of the host
    gang_port: int | None  # UDP, of every rank's supervisor, on the fabric; None for a gang of one
    publish: str  # address of the head that the API listens on
    gpu: bool
    rdma: bool

    @property
    def project(self) -> str:
        """Name of the compose project and prefix of every container and network."""
        return "exl3kit-" + self.name.replace(".", "-")

    @property
    def nodes(self) -> list[str]:
        """Distinct node names, head first."""
        return list(dict.fromkeys(rank.node for rank in self.ranks))

    @property
    def ports(self) -> list[int]:
        """Ports that the deployment takes on the head's node, the API's first."""
        return [self.port] if self.rendezvous is None else [self.port, self.rendezvous]

    @property
    def is_gang(self) -> bool:
        return len(self.ranks) > 1

    def on(self, node: str) -> list[Rank]:
        return [rank for rank in self.ranks if rank.node == node]

    def labels(self, rank: Rank) -> dict[str, str]:
        """Labels that say all the kit needs to find, judge and take down a rank again; there is no other state."""
        fields = {
            "deployment": self.name,
            "rank": str(rank.rank),
            "ranks": str(len(self.ranks)),
            "node": rank.node,
            "nodes": ",".join(one.node for one in self.ranks),
            "generation": self.generation,
            "stamp": self.stamp,
            "spec": self.spec,
            "model": self.served_name,
            "ports": ",".join(str(port) for port in self.ports),
        }
        return {LABEL + key: value for key, value in fields.items()}


def place(recipe: Recipe, nodes: Sequence[NodeFacts]) -> list[str]:
    """The node of each rank. Names that lead to one engine (`local`, or `local,local`) put every rank on it.

    Raises `KitError` when the number of nodes does not fit the recipe.
    """
    wanted = recipe.parallel.nodes
    engines = {node.engine for node in nodes}
    if len(engines) == 1 and len(nodes) in (1, wanted):
        return [nodes[0].name] * wanted
    if len(nodes) != wanted or len(engines) != len(nodes):
        raise KitError(
            f"{recipe.name} runs on {counted(wanted, 'node')}; --nodes names {', '.join(node.name for node in nodes)}",
            where="--nodes",
            next_step=f"name {counted(wanted, 'different node')}, or one node for all ranks",
        )
    return [node.name for node in nodes]


def plan(
    recipe: Recipe,
    stamp: str,
    placement: Sequence[str],
    facts: Mapping[str, NodeFacts],
    model_dirs: Mapping[str, str],
    generation: str,
    *,
    api_key: bool = False,
    kernel_table: str | None = None,
) -> Deployment:
    """The deployment of a recipe.

    Parameters
    ----------
    stamp: 64 hex digits; the image is `exl3kit:<first 12>`.
    placement: node of each rank, from `place`.
    model_dirs: directory of the weights on each node.
    generation: name of this incarnation of the gang; ranks of different generations never belong together.
    api_key: whether the API asks for a key (from a file that the kit puts on the head).
    kernel_table: from `kernel_table.of`, for every rank.

    Raises `KitError` (preflight) for ranks on two nodes of which one has no address that the other could reach.
    """
    bridge = len(set(placement)) == 1
    if not bridge:
        check_fabric([facts[node] for node in placement])
    publish = "0.0.0.0" if recipe.serve.listen == "open" else "127.0.0.1"
    project = "exl3kit-" + recipe.name.replace(".", "-")
    head = facts[placement[0]]
    hosts = [f"rank{number}" if bridge else facts[node].address for number, node in enumerate(placement)]
    gang = len(placement) > 1
    peers = ",".join(f"{host}:{gang_port(recipe)}" for host in hosts) if gang else None
    ranks = []
    for number, node in enumerate(placement):
        key_file = f"{head.cache}/deployments/{recipe.name}/api_key" if api_key and number == 0 else None
        master = "rank0" if bridge else head.address
        # on a bridge the engine's port mapping is what confines the API to loopback
        listen = "0.0.0.0" if bridge else publish
        env = environment(recipe, number, placement, facts, bridge=bridge)
        env |= identity(recipe, number, stamp, generation, key=key_file is not None, peers=peers)
        if kernel_table is not None:
            env["EXL3_KERNEL_TABLE"] = kernel_table
        ranks.append(
            Rank(
                rank=number,
                node=node,
                container=f"{project}-rank{number}",
                argv=tuple(vllm_argv(recipe, number, master=master, listen=listen)),
                env=env,
                model_dir=model_dirs[node],
                api_key_file=key_file,
                secret_file=f"{facts[node].cache}/deployments/{recipe.name}/gang_secret" if gang else None,
                cdi=by_cdi(facts[node]) and not recipe.image.on_cpu,
            )
        )
    drafted = Deployment(
        name=recipe.name,
        served_name=recipe.served_name,
        image=f"exl3kit:{stamp[:12]}",
        stamp=stamp,
        generation=generation,
        spec="",
        ranks=tuple(ranks),
        bridge=bridge,
        port=recipe.serve.port,
        rendezvous=None if bridge else rendezvous_port(recipe),
        gang_port=gang_port(recipe) if gang else None,
        publish=publish,
        gpu=not recipe.image.on_cpu,
        rdma=recipe.fabric.require == "rdma",
    )
    spec = spec_digest(drafted)
    told = tuple(replace(rank, env={**rank.env, "EXL3_SPEC": spec}) for rank in drafted.ranks)
    return replace(drafted, spec=spec, ranks=told)


def by_cdi(facts: NodeFacts) -> bool:
    """Whether a node's engine has CDI and no NVIDIA runtime to hand out a GPU with."""
    probe = facts.probe
    return probe is not None and probe.engine.cdi and bool(probe.cdi) and not probe.has_runtime


def spec_digest(deployment: Deployment) -> str:
    """sha256 over everything but the generation and what the operator calls the nodes, 64 hex digits."""
    fields = asdict(deployment)
    del fields["generation"], fields["spec"]
    for rank in fields["ranks"]:
        del rank["node"]  # another's name for the same machine is no reason to start anew
        rank["env"] = {
            name: value for name, value in rank["env"].items() if name not in ("EXL3_GENERATION", "EXL3_SPEC")
        }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def check_fabric(nodes: Sequence[NodeFacts]) -> None:
    """Refuse nodes that the other ranks could not connect to."""
    for node in nodes:
        if node.address.startswith("127.") or node.interface is None:
            raise KitError(
                f"this node's address on the fabric is not known ({node.address} is on none of its interfaces)",
                where=node.name,
                why="ranks on several machines connect to each other by that address",
                next_step="name nodes whose ssh HostName is their address on the fabric",
                code=ExitCode.PREFLIGHT,
            )


def vllm_argv(recipe: Recipe, rank: int, *, master: str, listen: str) -> list[str]:
    """Argv of vLLM for one rank; the same for all but for the rank's own place and the head's API."""
    serve, parallel = recipe.serve, recipe.parallel
    argv = ["vllm", "serve", MODEL_DIR, "--served-model-name", recipe.served_name, *parallel_options(recipe)]
    if parallel.nodes > 1:
        argv += ["--nnodes", str(parallel.nodes), "--node-rank", str(rank)]
        argv += ["--master-addr", master, "--master-port", str(rendezvous_port(recipe))]
    argv += engine_options(recipe)
    argv += ["--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", ",".join(ASKED_BY_THE_KIT)]
    argv += serve.args
    return argv + (["--host", listen, "--port", str(serve.port)] if rank == 0 else ["--headless"])


def parallel_options(recipe: Recipe) -> list[str]:
    """How the ranks share the model, in vLLM's words."""
    parallel = recipe.parallel
    words = ["--tensor-parallel-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        words += ["--pipeline-parallel-size", str(parallel.pipeline)]
    return words + (["--enable-expert-parallel"] if parallel.expert else [])


def engine_options(recipe: Recipe) -> list[str]:
    """The keys of `serve` that are options of vLLM's engine, in vLLM's words."""
    serve = recipe.serve
    words: list[str] = []
    for option, value in (
        ("--max-num-batched-tokens", serve.max_num_batched_tokens),
        ("--max-model-len", serve.max_model_len),
        ("--max-num-seqs", serve.max_num_seqs),
        ("--gpu-memory-utilization", serve.gpu_memory_utilization),
        ("--kv-cache-memory-bytes", serve.kv_cache_memory),
        ("--kv-cache-dtype", None if serve.kv_cache_dtype == "auto" else serve.kv_cache_dtype),
        ("--dtype", None if serve.dtype == "auto" else serve.dtype),
    ):
        if value is not None:
            words += [option, str(value)]
    if serve.enforce_eager:
        words += ["--enforce-eager"]
    if serve.speculative is not None:
        words += ["--speculative-config", json.dumps(serve.speculative.model_dump(exclude_none=True), sort_keys=True)]
    return words


def rendezvous_port(recipe: Recipe) -> int:
    """Port of the rendezvous: 10000 from the API's, so that two deployments with two API ports never meet."""
    port = recipe.serve.port
    return port + 10000 if port + 10000 <= 65535 else port - 10000


def gang_port(recipe: Recipe) -> int:
    """UDP port of the supervisors: 20000 from the API's."""
    port = recipe.serve.port
    return port + 20000 if port + 20000 <= 65535 else port - 20000


def environment(
    recipe: Recipe,
    rank: int,
    placement: Sequence[str],
    facts: Mapping[str, NodeFacts],
    *,
    bridge: bool,
) -> dict[str, str]:
    """Environment of one rank that a recipe may change: what the facts demand, and over that the recipe's own."""
    return own_environment(recipe) | facts_environment(recipe, rank, placement, facts, bridge=bridge) | recipe.serve.env


def own_environment(recipe: Recipe) -> dict[str, str]:
    """What the kit sets on every machine."""
    env = {
        "HOME": "/tmp",
        "VLLM_CACHE_ROOT": STATE_DIR + "/vllm",  # one folder of it for each spec; never shared between ranks
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the weights are here; a look-up over the network could only hang
    }
    if recipe.image.on_cpu:
        env["TORCH_COMPILE_DISABLE"] = "1"  # the image has no C++ compiler, and vLLM's small compiled helpers need one
    return env


def facts_environment(
    recipe: Recipe, rank: int, placement: Sequence[str], facts: Mapping[str, NodeFacts], *, bridge: bool
) -> dict[str, str]:
    """What the facts of the rank's node demand."""
    here = facts[placement[rank]]
    env = {}
    if recipe.image.on_cpu:
        binding = thread_binding(recipe, rank, placement, facts)
        if binding:
            env["VLLM_CPU_OMP_THREADS_BIND"] = binding
    if not bridge:
        env["VLLM_HOST_IP"] = here.address
        env |= network(recipe, rank, placement, facts)
        if here.own_name[:1] != (here.address,) and here.interface is not None:
            # Gloo binds to what the host name resolves to, often 127.0.1.1, and its peers cannot connect to that.
            env["GLOO_SOCKET_IFNAME"] = here.interface
    return env


def network(recipe: Recipe, rank: int, placement: Sequence[str], facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """What a rank's NCCL and Gloo are told of the fabric, from the facts alone; nothing for ranks that use no NCCL."""
    if recipe.image.on_cpu:
        return {}
    of_ranks = [facts[node] for node in placement]
    found = fabric.environment(
        [one.probe for one in of_ranks],
        [one.address for one in of_ranks],
        rank,
        rdma=recipe.fabric.require == "rdma",
    )
    return found | {"NCCL_DEBUG_FILE": f"{RUN_DIR}/{fabric.LOG_FILE}"} if found else {}


def identity(recipe: Recipe, rank: int, stamp: str, generation: str, *, key: bool, peers: str | None) -> dict[str, str]:
    """Environment that says which rank this is and how its EXL3 layers run; no recipe's `serve.env` overrides it."""
    env = {}
    if recipe.exl3.prefill_reconstruct_m != "auto":
        env["VLLM_EXL3_PREFILL_RECONSTRUCT_M"] = str(recipe.exl3.prefill_reconstruct_m)
    if recipe.exl3.graph_decode:
        env["VLLM_EXL3_GRAPH_DECODE"] = "1"
    env |= {
        "EXL3_TIER": recipe.exl3.tier,
        "EXL3_RANK": str(rank),
        "EXL3_GENERATION": generation,
        "EXL3_STAMP": stamp,
        "EXL3_MODEL_DIR": MODEL_DIR,
        "EXL3_RUN_DIR": RUN_DIR,
        "EXL3_STATE_DIR": STATE_DIR,
        "EXL3_STALL_S": str(recipe.serve.stall_s),
        "EXL3_GRACE_S": str(DRAIN_S),
        "EXL3_RECEIPT_DIR": RUN_DIR + "/receipts",
        "EXL3_API": f"http://127.0.0.1:{recipe.serve.port}",
    }
    if peers is not None:
        env |= {"EXL3_PEERS": peers, "EXL3_GANG_SECRET_FILE": SECRET_FILE}
    if key:
        env["EXL3_API_KEY_FILE"] = KEY_FILE
    return env


def thread_binding(recipe: Recipe, rank: int, placement: Sequence[str], facts: Mapping[str, NodeFacts]) -> str | None:
    """Cores of each worker of a CPU rank, in vLLM's notation (`0-3|4-7`); None leaves the choice to vLLM.

    vLLM's own choice starts at core 0 in every container, so two ranks of one machine would share it: 17 tokens/s
    instead of 42-60.
    """
    here = facts[placement[rank]]
    neighbours = [number for number, node in enumerate(placement) if facts[node].machine == here.machine]
    workers = recipe.parallel.ranks_per_node
    shares = len(neighbours) * workers
    if shares == 1:
        return None
    first = neighbours.index(rank) * workers
    return "|".join(core_list(share_of(here.cpus, number, shares)) for number in range(first, first + workers))


def share_of(cpus: Sequence[int], number: int, shares: int) -> list[int]:
    """The `number`th of `shares` even parts of the cores; with fewer cores than shares, one core each, in turn."""
    if len(cpus) < shares:
        return [cpus[number % len(cpus)]]
    return list(cpus[number * len(cpus) // shares : (number + 1) * len(cpus) // shares])


def core_list(cpus: Sequence[int]) -> str:
    """Cores as ranges: [0, 1, 2, 5] is `0-2,5`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
