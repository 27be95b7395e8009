"""What is measured: a deployment of the kit, or any server behind a URL; and what stands around it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exl3kit import recipes
from exl3kit.bench.places import Here, InContainer, Place
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.containers import Standing
    from exl3kit.recipe import Recipe

OURS = ("EXL3_GENERATION", "EXL3_SPEC")  # a name and a digest, which differ and mean nothing
RUNTIME_RECEIPTS = 6.0  # seconds: a rank writes its receipt anew at most every 5


@dataclass
class Target:
    """A running server and what is known of it."""

    place: Place
    recipe: Recipe | None = None
    standing: list[Standing] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = next(iter(self.place.run({"do": "facts"})))

    @property
    def model(self) -> str:
        return str(self.facts["model"])

    @property
    def max_model_len(self) -> int:
        """Raises `KitError` when the server does not say it."""
        length = self.facts.get("max_model_len")
        if not isinstance(length, int):
            raise KitError("the server does not say how long a prompt may be", where=self.place.name,
                           why="its /v1/models has no max_model_len", code=ExitCode.SERVING)  # fmt: skip
        return length

    @property
    def max_num_seqs(self) -> int | None:
        return self.recipe.serve.max_num_seqs if self.recipe else None

    def receipts(self) -> list[dict[str, Any]]:
        """The receipts of all ranks as they are now; empty behind a URL."""
        from exl3kit import receipts

        return receipts.collect(self.standing) if self.standing else []

    @contextmanager
    def boot(self, number: int, arm: str) -> Iterator[dict[str, Any]]:
        """The record of a boot that the body measures: its environment, and the receipts of all ranks before and after.

        It is whole when the body has ended.
        """
        told: dict[str, Any] = {"number": number, "arm": arm, "at": time.time(), "environment": self.environment()}
        told["before"] = self.receipts()
        yield told
        if told["before"]:
            time.sleep(RUNTIME_RECEIPTS)
        told["after"] = self.receipts()

    def environment(self) -> dict[str, Any]:
        """All that could make a figure another one, and is equal between boots of one recipe."""
        facts = {key: self.facts.get(key) for key in ("model", "max_model_len", "vllm", "cpus", "kernel", "cpu")}
        return {**facts, "ranks": [rank_environment(one) for one in self.standing]}


def rank_environment(one: Standing) -> dict[str, Any]:
    """What a rank's container was started with; the API key is a mounted file and so in none of it."""
    config, host = one.container.attrs["Config"], one.container.attrs["HostConfig"]
    env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
    return {
        "rank": one.rank,
        "node": one.node.name,
        "image": one.container.attrs["Image"],
        "stamp": one.label("stamp"),
        "argv": options([word for word in config.get("Cmd") or () if word != "--"]),
        "env": {name: value for name, value in sorted(env.items()) if name not in OURS},
        "mounts": [[homeless(mount["Source"]), mount["Target"]] for mount in host.get("Mounts") or ()],
        "limits": {key: host.get(key) for key in ("Memory", "NanoCpus", "CpusetCpus", "ShmSize")},
    }


def homeless(path: str) -> str:
    """A path without the name of the user at whose home it lies: receipts are handed on."""
    return re.sub(r"^/(root|home/[^/]+)/", "~/", path)


def options(argv: Sequence[str]) -> dict[str, Any]:
    """An argv by its options, so that one more or less shifts no other; a flag alone is True, the rest has numbers."""
    told: dict[str, Any] = {}
    for number, (word, after) in enumerate(zip(argv, [*argv[1:], "--"], strict=True)):
        if word.startswith("--"):
            told[word] = True if after.startswith("--") else after
        elif number == 0 or not argv[number - 1].startswith("--"):
            told[str(number)] = word
    return told


def deployed(recipe: Recipe, standing: Sequence[Standing]) -> Target:
    """A gang that runs; raises `KitError` (serving) when it does not."""
    running = [one for one in standing if one.state == "running"]
    if len(running) < recipe.parallel.nodes:
        next_step = f"`kit up {recipes.said(recipe)}` first"
        raise KitError(f"{recipe.name} does not run", next_step=next_step, code=ExitCode.SERVING)
    head = min(running, key=lambda one: one.rank)
    return Target(InContainer(head), recipe, list(running))


@contextmanager
def opened(
    recipe: str | None, sets: Sequence[str], nodes: str, url: str | None, key_file: str | None
) -> Iterator[Target]:
    """The target that the options of a verb name: a recipe that is up on its nodes, or a URL."""
    if (recipe is None) == (url is None):
        raise KitError("a recipe that is up, or --url, says what is measured", next_step="name one of them")
    if url is not None:
        yield Target(Here(url.rstrip("/").removesuffix("/v1"), key_file))
        return
    from exl3kit import containers, recipes
    from exl3kit.nodes import open_nodes

    loaded = recipes.load(str(recipe), sets)
    with open_nodes(nodes) as reached:
        yield deployed(loaded, containers.find(reached, loaded.name))


def described(target: Target) -> dict[str, Any]:
    """The head record's part about what is measured: recipe and lock in full, and the server's facts."""
    told: dict[str, Any] = {"target": target.place.name, "facts": {**target.facts, "metrics": None}}
    return told | (recorded(target.recipe) if target.recipe is not None else {})


def recorded(recipe: Recipe) -> dict[str, Any]:
    """A recipe as receipts hold it, with the whole lock of its image."""
    from exl3kit import lock, paths

    locked, told = lock.make_lock(recipe), recipe.model_dump(mode="json")
    if recipe.model.path is not None:  # where a checkout lies is nobody's business, and differs between machines
        told["model"]["path"] = paths.shown(recipe.model.path)
    return {"recipe": told, "stamp": locked.stamp, "lock": locked.data}
