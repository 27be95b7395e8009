"""Weights: from a directory here to the same directory on every node, checked there as the rank will see it.

A node's copy lives in `<cache>/weights/<name>-<12 hex of the content>`, so two models never share a folder and an old
copy is never mistaken for a new one. It is filled under another name and renamed when complete.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import deployment as plans
from exl3kit import manifest, node_files
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.deployment import NodeFacts
    from exl3kit.nodes import Node
    from exl3kit.recipe import Recipe

CHUNK = 1 << 20


@dataclass(frozen=True)
class Weights:
    """A model directory on this machine, surveyed and found whole."""

    source: Path
    files: Mapping[str, Mapping[str, Any]]  # name -> {size, digest}
    trellis_tensors: int
    trellis_bytes: int
    sizes: Mapping[str, int]  # what memory is planned with, see `admission.Sizes`
    config: Mapping[str, Any]  # the model's config.json

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


def survey(recipe: Recipe) -> Weights:
    """The recipe's weights on this machine.

    Raises `KitError` (preflight) naming everything that is missing, cut off or damaged.
    """
    source = locate(recipe)
    found = manifest.survey(source)
    refuse_problems(found["problems"], where=str(source))
    return of(source, found)


def of(source: Path, found: Mapping[str, Any]) -> Weights:
    """The weights that a survey of `source` found."""
    return Weights(source, *(found[name] for name in ("files", "trellis_tensors", "trellis_bytes", "sizes", "config")))


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
    assert model.repo is not None and model.revision is not None
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    snapshot = Path(hub) / f"models--{model.repo.replace('/', '--')}" / "snapshots" / model.revision
    if not snapshot.is_dir():
        raise KitError(
            f"{model.repo} at {model.revision[:12]} is not on this machine",
            where=str(snapshot),
            next_step=f"`hf download {model.repo} --revision {model.revision}`",
            code=ExitCode.PREFLIGHT,
        )
    return snapshot


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
    if node.is_local and world_readable(weights):
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


def bring(node: Node, facts: NodeFacts, weights: Weights, image: str, advance: Callable[[int], None]) -> str:
    """Make the node have the weights; returns what was done.

    What is there is checked in the image, as the rank's user; what is not there is copied, then checked the same way.

    Raises `KitError`: preflight for an unreadable or incomplete copy or too little space, verification for a copy that
    is not what was put there.
    """
    directory = directory_on(node, facts, weights)
    if node.run(["test", "-d", directory]).returncode == 0:
        compare(node, weights, directory, survey_on(node, image, directory))
        return "there already"
    copy(node, facts, weights, directory, image, advance)
    return "copied"


def drop_cache(nodes: Sequence[Node], folders: Mapping[str, str]) -> None:
    """Let every node forget the cached pages of its weights' files; `folders` is by node. They are clean, so this costs
    nothing but reading them again.

    `dd` with `nocache` and no data calls posix_fadvise(POSIX_FADV_DONTNEED) for the whole file.
    """
    command = ["find", "-L", "", "-type", "f", "-exec", "dd", "if={}", "iflag=nocache", "count=0", "status=none", ";"]
    there = [node for node in nodes if node.name in folders]
    with ThreadPoolExecutor(max_workers=max(1, len(there))) as pool:
        list(pool.map(lambda node: node.run([*command[:2], folders[node.name], *command[3:]], timeout=120), there))


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


def survey_on(node: Node, image: str, directory: str) -> dict[str, Any]:
    """`manifest.survey` of a folder on a node, run in the image as the rank's user."""
    program = ["python3", "-I", "-c", inspect.getsource(manifest), plans.MODEL_DIR]
    return dict(json.loads(node_files.run(node, image, program, directory)))


def copy(
    node: Node, facts: NodeFacts, weights: Weights, directory: str, image: str, advance: Callable[[int], None]
) -> None:
    """Copy every file that is not there yet, check the whole, then give it its name."""
    partial = directory + ".partial"
    made = node.run(["install", "-d", "-m", "755", partial])  # whatever the umask
    if made.returncode != 0:
        raise node.error("cannot make a folder for the weights", why=made.stderr.strip(), code=ExitCode.PREFLIGHT)
    present = survey_on(node, image, partial)["files"]
    missing = [name for name, entry in weights.files.items() if present.get(name) != entry]
    check_space(node, partial, sum(int(weights.files[name]["size"]) for name in missing))
    if missing:
        node_files.put(node, image, partial, tar(weights, missing, facts, advance))
    compare(node, weights, partial, survey_on(node, image, partial))
    renamed = node.run(["mv", "-T", partial, directory])
    if renamed.returncode != 0:
        raise node.error(f"cannot rename {partial}", why=renamed.stderr.strip(), code=ExitCode.PREFLIGHT)


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
