"""Serving: bring a recipe up on its nodes, prove that it answers, and take it down again.

The state of a deployment is its containers' labels and nothing else, so any machine that reaches the nodes may ask.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exl3kit import (
    asking,
    containers,
    deploy_lock,
    doctor,
    facts,
    image,
    image_store,
    kernel_table,
    lock,
    node_files,
    ports,
    post_mortem,
    proving,
    receipts,
    recipes,
    run_log,
    transport,
)
from exl3kit import deployment as plans
from exl3kit import weights as weight_files
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.asking import Answer
    from exl3kit.containers import Standing
    from exl3kit.deploy_lock import Locks
    from exl3kit.deployment import Deployment, NodeFacts
    from exl3kit.lock import Lock
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress
    from exl3kit.recipe import Recipe
    from exl3kit.weights import Weights

READY_SECONDS = 1800.0  # loading 164 GiB from one disk and compiling takes this long at worst


@dataclass(frozen=True)
class Serving:
    """A deployment that has answered a real completion."""

    deployment: Deployment
    standing: list[Standing]
    answer: Answer
    receipts: list[dict[str, Any]]
    started: bool  # False: it was serving already

    @property
    def head(self) -> Standing:
        return self.standing[0]

    @property
    def url(self) -> str:
        """Where the API is, as seen on the head's node."""
        return f"http://127.0.0.1:{self.deployment.port}/v1"


@dataclass(frozen=True)
class Ground:
    """What a deployment stands on: the lock, the weights, the nodes in use (head first) and their facts."""

    recipe: Recipe
    lock: Lock
    weights: Weights
    nodes: list[Node]
    facts: Mapping[str, NodeFacts]
    placement: list[str]
    build: bool = True  # whether an image that is not on every node may be built and copied

    def plan(self, generation: str) -> Deployment:
        """The deployment on this ground."""
        folders = {
            node.name: weight_files.directory_on(node, self.facts[node.name], self.weights) for node in self.nodes
        }
        key = self.recipe.serve.api_key_file is not None
        table = kernel_table.of(self.recipe, [self.facts[node.name] for node in self.nodes])
        stamp, placement = self.lock.stamp, self.placement
        return plans.plan(
            self.recipe, stamp, placement, self.facts, folders, generation, api_key=key, kernel_table=table
        )


@dataclass(frozen=True)
class Terms:
    """On which terms ranks are started."""

    ready_s: float = READY_SECONDS  # until the first answer
    break_lock: bool = False  # take the deployment lock from another operator
    force: bool = False  # though the memory does not suffice
    stamp: str | None = None  # of an earlier image to serve with
    build: bool = True  # what is missing; otherwise it is refused
    verb: str = ""  # that the deployment lock names; `up` and the recipe when left out


ANY_TERMS = Terms()


def new_generation() -> str:
    """A name for a new incarnation of a gang: UTC to the microsecond, so that later ones sort later."""
    now = time.time()
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"


def survey(recipe: Recipe, nodes: Sequence[Node], *, stamp: str | None = None, build: bool = True) -> Ground:
    """Look at everything that a deployment depends on, without changing anything.

    `stamp` names an earlier image to serve with. Raises `KitError` for weights that are not whole, nodes that do not
    fit the recipe, pins that are unknown, or a stamp that no node has.
    """
    locked = image_store.recall(nodes, stamp)[2] if stamp else lock.make_lock(recipe)
    asked = facts.gather(nodes)
    weights = weight_files.survey(recipe, nodes, asked, locked.tag)
    placement = plans.place(recipe, [asked[node.name] for node in nodes])
    used = [node for node in nodes if node.name in placement]
    return Ground(recipe, locked, weights, used, asked, placement, build)


def up(recipe: Recipe, nodes: Sequence[Node], progress: Progress, terms: Terms = ANY_TERMS) -> Serving:
    """Bring a recipe up; nothing happens when exactly this already serves.

    Everything that may refuse does so before anything that runs is stopped. What was started is taken away again when
    it does not come to serve, whatever the reason, Ctrl-C included.

    Raises `KitError`: preflight (another operator at work among it), build, verification, or serving.
    """
    with deploy_lock.hold(nodes, terms.verb or f"up {recipe.name}", break_lock=terms.break_lock) as locks:
        ground, standing = look(recipe, nodes, progress, locks, terms)
        deployment = ground.plan(new_generation())
        if is_serving(standing, deployment):
            try:
                progress.tell("exactly this stands there already: it is asked, and nothing is started")
                return proven(standing, ground, deployment, progress, asking.ANSWER_SECONDS, started=False)
            except KitError as silent:
                progress.tell(f"what stands there does not serve and is started anew: {silent.what}")
        elif standing:
            progress.tell(f"what stands there is to be replaced: {difference(standing, deployment)}")
        return replace(ground, deployment, progress, locks, terms)


def restart(recipe: Recipe, nodes: Sequence[Node], progress: Progress, terms: Terms = ANY_TERMS) -> Serving:
    """Replace what stands of a recipe as a gang, also when it is the same; nothing is stopped unless all can start.

    Raises `KitError` as `up` does, and preflight when nothing of the recipe stands.
    """
    with deploy_lock.hold(nodes, f"restart {recipe.name}", break_lock=terms.break_lock) as locks:
        ground, standing = look(recipe, nodes, progress, locks, terms)
        if not standing:
            raise KitError(
                f"no rank of {recipe.name} is there to restart",
                where=", ".join(node.name for node in nodes),
                next_step=f"`kit up {recipes.said(recipe)}` with the same --nodes",
                code=ExitCode.PREFLIGHT,
            )
        return replace(ground, ground.plan(new_generation()), progress, locks, terms)


def look(
    recipe: Recipe, nodes: Sequence[Node], progress: Progress, locks: Locks, terms: Terms
) -> tuple[Ground, list[Standing]]:
    """The ground of a recipe and what stands of it there."""
    for sentence in locks.broken:
        progress.tell(sentence)
    with progress.stage("look at nodes and weights"):
        ground = survey(recipe, nodes, stamp=terms.stamp, build=terms.build)
        standing = containers.find(ground.nodes, recipe.name)
    for sentence in strays(standing, [node.name for node in ground.nodes]):
        progress.tell(sentence)
    return ground, standing


def replace(ground: Ground, deployment: Deployment, progress: Progress, locks: Locks, terms: Terms) -> Serving:
    """Put a deployment in the place of what stands under its name: first whatever may refuse, then stop, then start."""
    with progress.stage("preflight") as stage:
        key, warnings = preflight(ground, deployment, force=terms.force)
        stage.conclude(f"{len(warnings)} warnings" if warnings else "nothing speaks against it")
    for sentence in warnings:
        progress.tell(sentence)
    prepare(ground, progress)
    locks.check()
    with progress.stage("stop what stood before") as stage:  # or a network, left of a kit that was killed
        post_mortem.keep(containers.find(ground.nodes, deployment.name))
        removed = containers.take_down(ground.nodes, deployment.name)
        stage.conclude(", ".join(removed) or "nothing did")
    settle(ground, deployment, progress, force=terms.force)
    with removed_on_failure(ground.nodes, deployment):
        with progress.stage("start the ranks"):
            standing = start(ground, deployment, key)
        serving = proven(standing, ground, deployment, progress, terms.ready_s, started=True)
        locks.check()
    return serving


def settle(ground: Ground, deployment: Deployment, progress: Progress, *, force: bool) -> None:
    """Drop the weights' page cache, which counts against a GPU that shares the memory, and wait for free memory."""
    with progress.stage("memory") as stage:
        weight_files.drop_cache(ground.nodes, {rank.node: rank.model_dir for rank in deployment.ranks})
        if not force:
            waited = doctor.await_memory(ground.recipe, ground.weights, ground.nodes, ground.facts, deployment)
            stage.conclude(f"came back after {waited:.0f} s" if waited > doctor.LOOK_SECONDS else "free")


def proven(
    standing: list[Standing],
    ground: Ground,
    deployment: Deployment,
    progress: Progress,
    deadline_s: float,
    *,
    started: bool,
) -> Serving:
    """What stands, after a real completion, receipts that add up, and the network that the recipe asks for."""
    with progress.stage("first answer") as stage:
        answer = proving.prove(standing, ground.recipe, deadline_s=deadline_s, say=stage.say)
        stage.conclude(f"API up after {answer.waited:.1f} s" if started else "nothing was started")
    with progress.stage("receipts") as stage:
        counted = proven_receipts(standing, ground)
        ways = transport.look(standing)
        if ground.recipe.fabric.require == "rdma":
            transport.require_rdma(standing, ways)
        stage.conclude("; ".join(f"rank {one.rank} {way.says}" for one, way in zip(standing, ways, strict=True)))
    counted = receipts.with_transports(counted, standing, ways)
    return Serving(deployment, standing, answer, counted, started=started)


def preflight(ground: Ground, deployment: Deployment, *, force: bool = False) -> tuple[str | None, list[str]]:
    """Everything that may refuse before gigabytes are copied and before anything that runs is stopped.

    Gives the API's key, and what the nodes are to be warned of.

    Raises `KitError` (preflight).
    """
    if not ground.build:
        image_store.require_everywhere(ground.nodes, ground.lock, recipes.said(ground.recipe))
    containers.require_own_names(ground.nodes, deployment)
    ports.require_free(ground.nodes[0], deployment.ports, spare=deployment.name)
    if deployment.gang_port is not None and not deployment.bridge:
        for node in ground.nodes:
            ports.require_free_udp(node, deployment.gang_port, spare=deployment.name)
    key = api_key(ground.recipe)
    return key, doctor.preflight(ground.recipe, ground.weights, ground.nodes, ground.facts, deployment, force=force)


def difference(standing: Sequence[Standing], deployment: Deployment) -> str:
    """Why what stands is not the deployment, in a few words."""
    if len(standing) != len(deployment.ranks):
        return f"{len(standing)} of {len(deployment.ranks)} ranks are there"
    if ended := [one for one in standing if one.state != "running"]:
        return f"rank {ended[0].rank} is {ended[0].state}"
    if any(one.label("stamp") != deployment.stamp for one in standing):
        return f"its image is {standing[0].label('stamp')[:12]}, and the recipe's is {deployment.stamp[:12]}"
    if any(one.label("spec") != deployment.spec for one in standing):
        return "its settings are others"
    return "its ranks are of several generations"


def strays(standing: Sequence[Standing], named: Sequence[str]) -> list[str]:
    """A sentence for every node that ranks of a standing deployment were put on and that is not among the named.

    The names are those of the `--nodes` that it was started with, which may have been a cluster file's or other ssh
    names: none of them is given as one that ssh knows here.
    """
    meant = {node for one in standing for node in one.label("nodes").split(",") if node}
    name = standing[0].deployment if standing else ""
    return [
        f"{name} also has a rank on {node}, which --nodes leaves out: `kit down {name}` with --nodes that lead to it"
        for node in sorted(meant - set(named))
    ]


def prepare(ground: Ground, progress: Progress) -> None:
    """Bring image and weights to every node."""
    image.ensure(ground.recipe, ground.lock, ground.nodes, progress=progress)
    stopped = threading.Event()
    with progress.stage("weights", total=ground.weights.size * len(ground.nodes)) as stage:

        def advance(count: int) -> None:
            if stopped.is_set():
                raise OSError("interrupted")
            stage.advance(count)

        there = (ground.nodes, ground.facts, ground.weights, ground.lock.tag)
        told = weight_files.spread(*there, advance, stopped, progress.tell)
        stage.conclude(", ".join(f"{name} {what}" for name, what in told.items()))


def api_key(recipe: Recipe) -> str | None:
    """The key in the recipe's file; refused when it cannot be one."""
    path = recipe.serve.api_key_file
    if path is None:
        return None
    try:
        key = run_log.keep_secret(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise KitError(
            "the API key cannot be read", where=str(path), why=str(error), code=ExitCode.PREFLIGHT
        ) from error
    if not key or not key.isprintable() or " " in key:
        raise KitError(
            "this is no API key",
            where=str(path),
            why="it is empty, or holds blanks",
            next_step=f"`openssl rand -hex 32 > {path}`",
            code=ExitCode.PREFLIGHT,
        )
    return key


def is_serving(standing: Sequence[Standing], deployment: Deployment) -> bool:
    """Whether exactly this deployment runs: every rank, of one generation, from the same files and image."""
    if [one.rank for one in standing] != [rank.rank for rank in deployment.ranks]:
        return False
    generations = {one.label("generation") for one in standing}
    same = all(one.label("spec") == deployment.spec and one.state == "running" for one in standing)
    return same and len(generations) == 1


@contextmanager
def removed_on_failure(nodes: Sequence[Node], deployment: Deployment) -> Iterator[None]:
    """Take the deployment's generation away when the body fails or is interrupted, undisturbed by a second Ctrl-C."""
    try:
        yield
    except BaseException as failure:
        with undisturbed():
            try:
                post_mortem.keep(containers.find(nodes, deployment.name, deployment.generation))
                containers.take_down(nodes, deployment.name, generation=deployment.generation, grace=0)
            except KitError as left:
                raise with_remains(failure, left) from failure
        raise


def with_remains(failure: BaseException, left: KitError) -> KitError:
    """The failure of a start after which a node could not be cleared, saying both."""
    if not isinstance(failure, KitError):
        return left
    steps = [failure.next_step, f"what was started could not be removed everywhere: {left}"]
    next_step = "\n  ".join(step for step in steps if step)
    return KitError(failure.what, where=failure.where, why=failure.why, next_step=next_step, code=failure.code)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM for a moment (only the main thread can; elsewhere they do not arrive)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(ground: Ground, deployment: Deployment, key: str | None) -> list[Standing]:
    """Create every rank on its node, then start them, rank 0 first: it listens for the others.

    A rank 1 that starts 25 s before rank 0 makes vLLM's start 60 s instead of 28.
    """
    with ThreadPoolExecutor(max_workers=len(ground.nodes)) as pool:
        # New for each start: an old rank cannot prove that it belongs to this gang.
        secret = run_log.keep_secret(secrets.token_hex(32))
        list(pool.map(lambda node: put_secrets(node, deployment, key, secret), ground.nodes))
    made = [one for node in ground.nodes for one in containers.create(node, deployment)]
    made.sort(key=lambda one: one.rank)
    for one in made:
        containers.start(one, deployment)
    return made


def put_secrets(node: Node, deployment: Deployment, key: str | None, secret: str) -> None:
    """Lay what the ranks of a node must know where only they can read it: the API's key, and the gang's secret."""
    files: dict[str, str] = {}
    for rank in deployment.on(node.name):
        if rank.api_key_file is not None and key is not None:
            files[rank.api_key_file] = key
        if rank.secret_file is not None:
            files[rank.secret_file] = secret
    for path, text in files.items():
        node_files.put_secret(node, deployment.image, path, text)


def proven_receipts(standing: Sequence[Standing], ground: Ground) -> list[dict[str, Any]]:
    """The receipts of all ranks, after they were found to add up."""
    counted = receipts.collect(standing)
    receipts.verify(counted, ground.recipe, ground.weights)
    return counted
