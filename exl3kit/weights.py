"""Weights: from where they are, this machine or a node, to every node, checked there as the rank will see them.

A node's copy lives in `<cache>/weights/<name>-<12 hex of the content>`, so two models never share a folder and an old
copy is never mistaken for a new one. It is filled under another name and renamed when complete. Where the node has the
files already, in a folder of the recipe's or in Hugging Face's cache, the copy is made of hard links and costs nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import deployment as plans
from exl3kit import hub, manifest, node_files, recipes, side_by_side, weight_sync
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.recipe import Recipe

CHUNK = 1 << 20
LINK_SECONDS = 120.0  # for some hundred links


@dataclass(frozen=True)
class Weights:
    """A model directory on this machine or on a node, surveyed and found whole."""

    source: Path
    files: Mapping[str, Mapping[str, Any]]  # name -> {size, digest}
    trellis_tensors: int
    trellis_bytes: int
    sizes: Mapping[str, int]  # what memory is planned with, see `admission.Sizes`
    config: Mapping[str, Any]  # the model's config.json
    holder: str | None = None  # the node that has them; None for this machine

    @property
    def digest(self) -> str:
        """sha256 over names, sizes and digests of all files, 64 hex digits."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(int(entry["size"]) for entry in self.files.values())

    @property
    def folder(self) -> str:
        """Name of the copy's folder on a node."""
        return f"{self.source.name}-{self.digest[:12]}"


def survey(
    recipe: Recipe, nodes: Sequence[Node] = (), facts: Mapping[str, NodeFacts] | None = None, image: str | None = None
) -> Weights:
    """The recipe's weights on this machine, or else on the first of the nodes that has them.

    Parameters
    ----------
    facts, image: of the nodes; the recipe's image does the looking there.

    Raises `KitError` (preflight) naming everything that is missing, cut off or damaged.
    """
    try:
        source = locate(recipe)
    except KitError as nowhere:
        return survey_nodes(recipe, nodes, facts or {}, image, nowhere)
    found = manifest.survey(source)
    refuse_problems(found["problems"], where=str(source))
    return of(source, found)


def survey_nodes(
    recipe: Recipe, nodes: Sequence[Node], facts: Mapping[str, NodeFacts], image: str | None, nowhere: KitError
) -> Weights:
    """The weights on the first node that has them; raises `nowhere` when none has."""
    for node in nodes:
        source = place_on(recipe, node, facts[node.name])
        if source is None:
            continue
        if image is None or not node.engine.images.list(name=image):
            raise node.error(
                f"the weights are there, in {source}, and only the recipe's image can look at them",
                next_step=f"`kit build {recipes.said(recipe)}` with the same --nodes, then this command again",
                code=ExitCode.PREFLIGHT,
            )
        found = survey_on(node, image, source, facts[node.name])
        refuse_problems(found["problems"], where=f"node {node.name}: {source}")
        return of(Path(source), found, holder=node.name)
    raise nowhere


def place_on(recipe: Recipe, node: Node, facts: NodeFacts) -> str | None:
    """The folder of a node that holds the recipe's weights: its `path`, or the commit in Hugging Face's cache there."""
    model = recipe.model
    if model.path is not None:
        folder = str(model.path)
    else:
        assert facts.probe is not None
        folder = f"{facts.probe.hub}/{hub.snapshot(*pinned(recipe))}"
    return folder if node.run(["test", "-d", folder]).returncode == 0 else None


def of(source: Path, found: Mapping[str, Any], *, holder: str | None = None) -> Weights:
    """The weights that a survey of `source` found."""
    return Weights(
        source,
        found["files"],
        found["trellis_tensors"],
        found["trellis_bytes"],
        found["sizes"],
        found["config"],
        holder,
    )


def locate(recipe: Recipe) -> Path:
    """The recipe's `model.path`, or the snapshot of its `repo` and `revision` in the Hugging Face cache."""
    model = recipe.model
    if model.path is not None:
        if model.path.is_dir():
            return model.path
        raise KitError(
            "there is no such model directory",
            where=str(model.path),
            next_step="put model.path of the recipe right, relative to the recipe's own file",
            code=ExitCode.PREFLIGHT,
        )
    repo, revision = pinned(recipe)
    snapshot = hub.cache() / hub.snapshot(repo, revision)
    if not snapshot.is_dir():
        raise KitError(
            f"{repo} at {revision[:12]} is not on this machine",
            where=str(snapshot),
            next_step=f"`kit weights fetch {recipes.said(recipe)}`, with --nodes to fetch it on a node",
            code=ExitCode.PREFLIGHT,
        )
    return snapshot


def pinned(recipe: Recipe) -> tuple[str, str]:
    """Repository and commit of a recipe; raises `KitError` (preflight) when no commit is pinned."""
    model = recipe.model
    assert model.repo is not None
    if model.revision is None:
        raise KitError(
            f"no commit of {model.repo} is pinned",
            where=f"model.revision of {recipe.name}",
            why="branches and tags move, and a pack has a branch for each rate",
            next_step=f"`kit lock --update {recipes.said(recipe)}` looks its branches up; put one into model.revision",
            code=ExitCode.PREFLIGHT,
        )
    return model.repo, model.revision


def refuse_problems(problems: Sequence[str], *, where: str) -> None:
    """Raise `KitError` (preflight) when a survey found problems."""
    if problems:
        listed = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise KitError(
            listed,
            where=where,
            why="vLLM would fail on it only after it has started, or leave tensors out without a word",
            next_step="fetch the model again; a download that was broken off continues where it stopped",
            code=ExitCode.PREFLIGHT,
        )


def directory_on(node: Node, facts: NodeFacts, weights: Weights) -> str:
    """Where the weights are to be on a node: in place on this machine when every user may read them, else a copy."""
    if node.is_local and weights.holder is None and world_readable(weights):
        return str(weights.source)
    return f"{facts.cache}/weights/{weights.folder}"


def world_readable(weights: Weights) -> bool:
    """Whether the rank's user could read every file, links followed; folders above do not matter to a mount."""
    folders = {weights.source, *((weights.source / name).parent for name in weights.files)}
    if not all(folder.stat().st_mode & stat.S_IROTH and folder.stat().st_mode & stat.S_IXOTH for folder in folders):
        return False
    for name in weights.files:
        path = weights.source / name
        # A link out of the folder (as in the Hugging Face cache) leads nowhere inside the container.
        if not path.resolve().is_relative_to(weights.source.resolve()) or not path.stat().st_mode & stat.S_IROTH:
            return False
    return True


def spread(
    nodes: Sequence[Node],
    facts: Mapping[str, NodeFacts],
    weights: Weights,
    image: str,
    advance: Callable[[int], None],
    stopped: threading.Event,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Make every node have the weights; returns by node what was done.

    A node that has them is the source for those that lack them, over the fabric; only what no node has is sent from
    here, and then to one node where that one can pass it on. Ctrl-C sets `stopped`, and `advance` is to raise then;
    `say` is told of a copy that fails while others go on.

    Raises `KitError`: preflight for an unreadable or incomplete copy or too little space, verification for a copy that
    is not what was put there, unreachable for a copy that broke off.
    """
    names = [node.name for node in nodes]
    looks = [partial(present, node, facts, weights, image) for node in nodes]
    found = side_by_side.run(*looks, stopped=stopped)
    done = dict(zip(names, found, strict=True))
    lacking = [node for node in nodes if done[node.name] is None]
    sources = [node for node in nodes if done[node.name] is not None and not (node.is_local and weights.holder is None)]
    if lacking and not sources and (weights.holder or can_pass_on(lacking, facts)):
        first = next((node for node in lacking if node.name == weights.holder), lacking[0])
        done[first.name] = bring(first, facts, weights, image, advance, None)
        sources = [first]
        lacking.remove(first)
    source = sources[0] if sources else None
    copies = [partial(bring, node, facts, weights, image, advance, source) for node in lacking]
    told = side_by_side.run(*copies, stopped=stopped, say=say)
    done.update(zip((node.name for node in lacking), told, strict=True))
    return {name: word or "" for name, word in done.items()}


def can_pass_on(nodes: Sequence[Node], facts: Mapping[str, NodeFacts]) -> bool:
    """Whether the first node can send to the others over the fabric."""
    first, *others = (facts[node.name] for node in nodes)
    return bool(others) and all(weight_sync.possible(first, other) for other in others)


def present(node: Node, facts: Mapping[str, NodeFacts], weights: Weights, image: str) -> str | None:
    """`there already` when the node has the weights, checked in the image as the rank's user; None when it lacks them.

    Raises `KitError` for a copy that is damaged or has other content.
    """
    directory = directory_on(node, facts[node.name], weights)
    if node.run(["test", "-d", directory]).returncode != 0:
        return None
    compare(node, weights, directory, survey_on(node, image, directory))
    return "there already"


def bring(
    node: Node,
    facts: Mapping[str, NodeFacts],
    weights: Weights,
    image: str,
    advance: Callable[[int], None],
    source: Node | None,
) -> str:
    """Fill a folder beside the one that the rank will see, check it, then give it its name; returns what was done.

    Parameters
    ----------
    source: a node that has them; None for the node itself when it holds them, else for this machine.
    """
    here = facts[node.name]
    directory = directory_on(node, here, weights)
    partial = directory + ".partial"
    made = node.run(["install", "-d", "-m", "755", partial])  # whatever the umask
    if made.returncode != 0:
        raise node.error("cannot make a folder for the weights", why=made.stderr.strip(), code=ExitCode.PREFLIGHT)
    if node.name == weights.holder:
        how = link(node, weights, partial)
    elif source is not None:
        how = pull(source, node, facts, weights, partial, image, advance)
    else:
        how = copy(node, here, weights, partial, image, advance)
    compare(node, weights, partial, survey_on(node, image, partial))
    renamed = node.run(["mv", "-T", partial, directory])
    if renamed.returncode != 0:
        raise node.error(f"cannot rename {partial}", why=renamed.stderr.strip(), code=ExitCode.PREFLIGHT)
    return how


def link(node: Node, weights: Weights, partial: str) -> str:
    """Hard links to the files that the node holds; a copy where they lie on another file system."""
    linked = node.run(["cp", "-rLlf", f"{weights.source}/.", partial], timeout=LINK_SECONDS)
    if linked.returncode == 0:
        return "linked"
    check_space(node, partial, weights.size)
    copied = node.run(["cp", "-rLu", f"{weights.source}/.", partial], timeout=weight_sync.COPY_SECONDS)
    if copied.returncode != 0:
        raise node.error("cannot copy the weights there", why=copied.stderr.strip()[-300:], code=ExitCode.PREFLIGHT)
    return "copied on the node"


def pull(
    source: Node,
    node: Node,
    facts: Mapping[str, NodeFacts],
    weights: Weights,
    partial: str,
    image: str,
    advance: Callable[[int], None],
) -> str:
    """Copy from another node: over the fabric where both have rsync, else through this machine."""
    sender, receiver = facts[source.name], facts[node.name]
    folder = directory_on(source, sender, weights)
    check_space(node, partial, weights.size - used(node, partial))
    if weight_sync.possible(sender, receiver):
        weight_sync.copy(source, node, (sender, receiver), folder, partial, advance)
        return f"copied from {source.name} over the fabric"
    there = survey_on(node, image, partial)["files"]
    for name, entry in weights.files.items():
        if there.get(name) != entry:
            stream = node_files.take(source, image, folder, name, receiver)
            node_files.put(node, image, partial, counted(stream, advance))
    return f"copied from {source.name} through this machine (rsync on both nodes would use the fabric)"


def counted(stream: Iterator[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in stream:
        advance(len(chunk))
        yield chunk


def used(node: Node, folder: str) -> int:
    """Bytes that a folder of a node takes on its disk."""
    words = node.run(["du", "-s", "-B1", folder]).stdout.split()
    return int(words[0]) if words and words[0].isdecimal() else 0


def copy(
    node: Node, facts: NodeFacts, weights: Weights, partial: str, image: str, advance: Callable[[int], None]
) -> str:
    """Send every file that is not there yet from this machine."""
    there = survey_on(node, image, partial)["files"]
    missing = [name for name, entry in weights.files.items() if there.get(name) != entry]
    check_space(node, partial, sum(int(weights.files[name]["size"]) for name in missing))
    if missing:
        node_files.put(node, image, partial, tar(weights, missing, facts, advance))
    return "copied"


def drop_cache(nodes: Sequence[Node], folders: Mapping[str, str]) -> None:
    """Let every node forget the cached pages of its weights' files; `folders` is by node. It costs nothing but reading
    them again.

    `sync` first: pages that are not on the disk yet stay. `dd` with `nocache` and no data then calls
    posix_fadvise(POSIX_FADV_DONTNEED) for the whole file.
    """
    forget = ["dd", "if={}", "iflag=nocache", "count=0", "status=none"]

    def forget_on(node: Node) -> None:
        files = ["find", "-L", folders[node.name], "-type", "f"]
        node.run([*files, "-exec", "sync", "{}", ";", "-exec", *forget, ";"], timeout=600)

    there = [node for node in nodes if node.name in folders]
    with ThreadPoolExecutor(max_workers=max(1, len(there))) as pool:
        list(pool.map(forget_on, there))


def compare(node: Node, weights: Weights, directory: str, found: Mapping[str, Any]) -> None:
    """Refuse a node's copy that differs from the weights here in any file."""
    refuse_problems(found["problems"], where=f"node {node.name}: {directory}")
    for name in sorted({*weights.files, *found["files"]}):
        here, there = weights.files.get(name), found["files"].get(name)
        if here != there:
            what = "is missing" if there is None else "does not belong there" if here is None else "has other content"
            raise node.error(
                f"{directory}/{name} {what}: these are not the weights of this deployment",
                why=f"compared with {weights.source}",
                next_step=f"remove {directory} on the node and run the command again; it is then copied anew",
                code=ExitCode.VERIFICATION,
            )


def survey_on(
    node: Node, image: str, directory: str, owner: NodeFacts | None = None, *, full: bool = False
) -> dict[str, Any]:
    """`manifest.survey` of a folder on a node, run in the image as the rank's user, or as the node's own.

    A commit in Hugging Face's cache consists of links into the folder two above it, so that one is what is mounted.
    """
    mounted, _, below = directory.partition("/snapshots/")
    inside = f"{plans.MODEL_DIR}/snapshots/{below}" if below else plans.MODEL_DIR
    program = ["python3", "-I", "-c", inspect.getsource(manifest), inside, *(["--full"] if full else [])]
    user = (owner.uid, owner.gid) if owner else None
    return dict(json.loads(node_files.run(node, image, program, mounted if below else directory, user=user)))


def check_space(node: Node, folder: str, needed: int) -> None:
    """Refuse when the node's disk has less room than `needed` bytes and 5 %."""
    done = node.run(["df", "-Pk", folder])
    words = done.stdout.splitlines()[-1].split() if done.returncode == 0 else []
    if len(words) < 4 or not words[3].isdecimal():
        raise node.error(
            "cannot read the free space", why=(done.stderr or done.stdout).strip(), code=ExitCode.PREFLIGHT
        )
    free = int(words[3]) * 1024
    if free < needed * 1.05:
        raise node.error(
            f"{folder} has room for {free / 1e9:.1f} GB, the weights need {needed / 1e9:.1f} GB",
            next_step="free space there, or point XDG_CACHE_HOME of the node's user to a larger disk",
            code=ExitCode.PREFLIGHT,
        )


def tar(weights: Weights, names: Sequence[str], owner: NodeFacts, advance: Callable[[int], None]) -> Iterator[bytes]:
    """A tar stream of the named files, world-readable, owned by the node's user."""
    folders: set[str] = set()
    for name in names:
        for parent in reversed(Path(name).parents[:-1]):
            if parent.as_posix() not in folders:
                folders.add(parent.as_posix())
                yield node_files.entry(parent.as_posix() + "/", 0, 0o755, owner.uid, owner.gid)
        size = int(weights.files[name]["size"])
        yield node_files.entry(name, size, 0o644, owner.uid, owner.gid)
        with (weights.source / name).open("rb") as file:
            sent = 0
            while sent < size:
                chunk = file.read(min(CHUNK, size - sent))
                if not chunk:
                    raise OSError(f"{name} has shrunk while it was copied")
                sent += len(chunk)
                advance(len(chunk))
                yield chunk
        yield node_files.padding(size)
    yield node_files.END
