"""Recipes of other launchers (eugr's version 1, sparkrun's version 2) as recipes of the kit.

Pure. Every key of a foreign file ends in exactly one of three ways, each with a sentence: mapped to a key of ours, kept
for the way back, or refused with the reason. A key that nobody knows is kept too. What the result lacks to be served
(a base image of ours, a pinned commit) is said as well.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from exl3kit import imported_flags, recipe_rules, recipe_view
from exl3kit.faults import did_you_mean
from exl3kit.recipe import Exl3, Recipe

MAPPED, KEPT, REFUSED = "mapped", "kept", "refused"
PROBE_TOKENS = 8  # what a recipe's probe asks for unless told otherwise
SINGLE = re.compile(r"\{([A-Za-z_][\w-]*)\}")
DOUBLED = re.compile(r"\{\{|\{([A-Za-z_][\w-]*)\}|\}\}")
PASSES = 10  # of substitution, as sparkrun does

_BUILD = "images are built from image: of the recipe, by `kit build`; there is no foreign base"
_LAUNCH = "the kit starts containers itself: not privileged, read-only, as its own user"
_HOOKS = "commands around the start would escape the lock and the gang"
_OTHER_ENGINE = "the kit serves with vLLM alone"
_DESCRIBES = "describes, and changes nothing"

# Every key of either format that has no code of its own below: how it ends, and why.
KEYS: dict[str, tuple[str, str]] = {
    "recipe_version": (MAPPED, "the format that was read"),
    "sparkrun_version": (KEPT, _DESCRIBES),
    "min_sparkrun_version": (KEPT, _DESCRIBES),
    "mode": (KEPT, "parallel.nodes says it"),
    "max_nodes": (KEPT, "a recipe of the kit has one number of nodes"),
    "runtime_version": (KEPT, "image.vllm says which vLLM"),
    "container": (REFUSED, f"{_BUILD}; a local tag such as vllm-node exists only where its script ran"),
    "containers": (REFUSED, f"{_BUILD}, the same on every node"),
    "build_args": (REFUSED, _BUILD),
    "builder": (REFUSED, _BUILD),
    "builder_config": (REFUSED, _BUILD),
    "mods": (REFUSED, "a script that changes a running container is in no lock: write a patch into overlay/patches"),
    "pre_exec": (REFUSED, _HOOKS),
    "post_exec": (REFUSED, _HOOKS),
    "post_commands": (REFUSED, _HOOKS),
    "stop_after_post": (REFUSED, _HOOKS),
    "executor": (REFUSED, "docker through the kit; `kit export` writes for others"),
    "executor_config": (REFUSED, _LAUNCH),
    "scheduler": (KEPT, "--nodes names the machines"),
    "distribution_config": (KEPT, "`kit weights sync` and `kit build` distribute"),
    "layout": (KEPT, "--nodes names the machines, in order"),
    "cluster_config": (KEPT, "internal to sparkrun; --nodes or a cluster file here"),
    "runtime_cache": (KEPT, "each rank has a volume of its own for compile caches"),
    "runtime_config": (KEPT, "options of a runtime that is not the kit's"),
    "readiness": (KEPT, "probe: is a real completion, and `kit up --ready` its patience"),
    "benchmark": (KEPT, "`kit bench` measures"),
    "capabilities": (KEPT, _DESCRIBES),
    "unsupported_capabilities": (KEPT, _DESCRIBES),
    "overrides": (REFUSED, "values that depend on the machine: write one recipe for each, with extends"),
    "include": (REFUSED, "extends: another recipe of the kit; import the included file as well"),
}
OWN = ("name", "description", "model", "model_revision", "runtime", "min_nodes", "cluster_only", "solo_only",
       "defaults", "env", "command", "metadata", "exl3kit")  # fmt: skip
NO_MODEL = "./MODEL"
TOP = "file"  # below `exl3kit:`, keys of the recipe that belong to no section
# Variables that are keys of ours: the key, and how its text is read.
EXL3: dict[str, tuple[str, Callable[[str], Any]]] = {
    "EXL3_TIER": ("tier", str),
    "VLLM_EXL3_PREFILL_RECONSTRUCT_M": ("prefill_reconstruct_m", int),
    "VLLM_EXL3_GRAPH_DECODE": ("graph_decode", {"0": False, "false": False, "1": True, "true": True}.__getitem__),
}


class ImportFault(Exception):
    """The file is no recipe at all; the sentence says why."""


@dataclass
class Imported:
    """A recipe of ours as plain data, the kept foreign keys, and one line for every foreign key."""

    data: dict[str, Any]
    kept: dict[str, Any] = field(default_factory=dict)
    report: list[tuple[str, str, str]] = field(default_factory=list)  # key, mapped/kept/refused, sentence
    missing: list[str] = field(default_factory=list)  # what is to be filled in before it can be served

    def tell(self, key: str, outcome: str, sentence: str, value: object = None) -> None:
        self.report.append((key, outcome, sentence))
        if outcome != MAPPED:
            self.kept[key] = value

    def serve(self, key: str, value: object) -> None:
        self.data.setdefault("serve", {})[key] = value


def translate(foreign: Mapping[Any, Any], stem: str) -> Imported:
    """One foreign recipe.

    Parameters
    ----------
    stem: name of its file, which is its name where the format says so.

    Raises `ImportFault` for a mapping that is no recipe: neither a command nor a model.
    """
    told = {str(key): value for key, value in foreign.items()}
    if "command" not in told and "model" not in told:
        raise ImportFault("it has neither command nor model")
    version = "1" if str(told.get("recipe_version", "2" if "runtime" in told else "1")) == "1" else "2"
    name = told.get("name") if version == "1" and told.get("name") else stem
    made = Imported({"recipe": 1, "name": slug(str(name)), "model": {}, "image": dict(imported_flags.IMAGE)})
    _describe(made, told, version, stem)
    _model(made, told)
    _nodes(made, told)
    _environment(made, told.get("env") or {}, given="env" in told)
    _command(made, told)
    for key, value in told.items():
        if key in KEYS:
            outcome, sentence = KEYS[key]
            made.tell(key, outcome, sentence, value)
        elif key not in OWN:
            near = did_you_mean(key, (*KEYS, *OWN))
            made.tell(key, KEPT, f"unknown to the format: did you mean {near}?" if near else "unknown to it", value)
    _settle(made)
    if "exl3kit" in told:
        _own_block(made, told["exl3kit"])
    if "exl3" in made.data and not valid(made.data):
        made.tell("exl3", REFUSED, "with the other keys it makes no valid recipe", made.data.pop("exl3"))
    made.missing += lacking(made.data)
    return made


def validated(data: Mapping[str, Any]) -> Recipe:
    """The recipe that imported data makes; raises pydantic's ValidationError when it makes none."""
    return Recipe.model_validate(data)


def valid(data: Mapping[str, Any]) -> bool:
    try:
        validated(data)
    except ValidationError:
        return False
    return True


def _own_block(made: Imported, block: object) -> None:
    """What `kit recipe export` wrote because the format has no word for it."""
    sections = block if isinstance(block, Mapping) else {}
    try:
        merged = {**made.data, **sections.get(TOP, {})}
        for key, section in sections.items():
            if key != TOP:
                merged[key] = {**merged.get(key, {}), **section}
        validated(merged)
    except (TypeError, ValueError):  # pydantic's is a ValueError
        sections = {}
    if not sections:
        made.tell("exl3kit", REFUSED, "with it the recipe would not be valid", block)
        return
    made.data = merged
    made.tell("exl3kit", MAPPED, "keys of the kit that the format has no word for")


def slug(text: str) -> str:
    """A name that a recipe may have."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63] or "imported"


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]


def _describe(made: Imported, told: Mapping[str, Any], version: str, stem: str) -> None:
    if "name" in told:
        ignored = version == "2" and slug(str(told["name"])) != made.data["name"]
        sentence = f"version 2 ignores it: the file is called {stem}" if ignored else "name"
        made.tell("name", KEPT if ignored else MAPPED, sentence, told["name"])
    metadata = told.get("metadata")
    described = metadata.get("description") if isinstance(metadata, Mapping) else None
    text = one_line(told.get("description") or described or "")
    if text:
        made.data["purpose"] = text
    if "description" in told:
        kept = text != str(told["description"]).strip()
        made.tell("description", KEPT if kept else MAPPED, "purpose" + (", shortened" if kept else ""),
                  told["description"])  # fmt: skip
    if "metadata" in told:
        made.tell("metadata", KEPT, "`kit plan` counts from the weights themselves", metadata)
    if "runtime" in told:
        runtime = str(told["runtime"])
        ours = runtime.startswith("vllm") or runtime == "eugr-vllm"
        made.tell("runtime", MAPPED if ours else REFUSED, "vLLM" if ours else _OTHER_ENGINE, told["runtime"])


def _model(made: Imported, told: Mapping[str, Any]) -> None:
    model, revision = told.get("model"), told.get("model_revision")
    if "model" in told:
        set_model(made, "model", model)
    if "model_revision" in told:
        if isinstance(revision, str) and re.fullmatch(r"[0-9a-f]{40}", revision) and made.data["model"].get("repo"):
            made.data["model"]["revision"] = revision
            made.tell("model_revision", MAPPED, "model.revision")
        else:
            made.tell("model_revision", REFUSED, "a branch or tag moves: pin the commit in model.revision", revision)


def set_model(made: Imported, key: str, model: object) -> None:
    """The weights by repository or by absolute path."""
    if isinstance(model, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}", model):
        made.data["model"] = {"repo": model}
        made.tell(key, MAPPED, "model.repo")
    elif isinstance(model, str) and model.startswith(("/", "~/")) and "\0" not in model:
        made.data["model"] = {"path": model}
        made.tell(key, MAPPED, "model.path")
    else:
        made.tell(key, REFUSED, "expected OWNER/NAME or an absolute path", model)


def _nodes(made: Imported, told: Mapping[str, Any]) -> None:
    nodes = told.get("min_nodes")
    if "min_nodes" in told:
        good = isinstance(nodes, int) and not isinstance(nodes, bool) and 1 <= nodes <= 64
        made.tell("min_nodes", MAPPED if good else REFUSED, "parallel.nodes" if good else "expected 1 to 64", nodes)
        if good:
            made.data["parallel"] = {"nodes": nodes}
    if "cluster_only" in told:
        if told["cluster_only"] is True and "parallel" not in made.data:
            made.data["parallel"] = {"nodes": 2}
        made.tell("cluster_only", MAPPED, "parallel.nodes of 2 at least")
    if "solo_only" in told:
        both = told["solo_only"] is True and told.get("cluster_only") is True
        if told["solo_only"] is True and not both:
            made.data["parallel"] = {"nodes": 1}
        sentence = "cluster_only says the opposite" if both else "parallel.nodes: 1"
        made.tell("solo_only", REFUSED if both else MAPPED, sentence, told["solo_only"])


def _environment(made: Imported, env: object, *, given: bool) -> None:
    if not isinstance(env, Mapping):
        made.tell("env", REFUSED, "expected a mapping", env)
        return
    for name, value in env.items():
        key = f"env.{name}"
        text = json.dumps(value) if isinstance(value, bool) else str(value)
        if str(name) in EXL3 and _own_variable(made, str(name), text):
            continue
        faults = recipe_rules.environment_faults({str(name): text})
        if isinstance(value, Mapping | list) or value is None or "\0" in text:
            made.tell(key, REFUSED, "expected one text", value)
        elif faults:
            made.tell(key, REFUSED, f"{faults[0].what}: {faults[0].hint}", value)
        elif "$" in text or "{" in text:
            made.tell(key, REFUSED, "nothing expands $ or {} in a value here: write the value itself", value)
        else:
            made.data.setdefault("serve", {}).setdefault("env", {})[str(name)] = text
            made.tell(key, MAPPED, "serve.env")
    if given and not env:
        made.tell("env", MAPPED, "empty")


def _own_variable(made: Imported, name: str, text: str) -> bool:
    """Put a variable that is a key of ours under it; False when its text is none that the key takes."""
    key, read = EXL3[name]
    try:
        value = read(text.lower())
        Exl3.model_validate({key: value})
    except (KeyError, ValueError):
        return False
    made.data.setdefault("exl3", {})[key] = value
    made.tell(f"env.{name}", MAPPED, f"exl3.{key}")
    return True


def _command(made: Imported, told: Mapping[str, Any]) -> None:
    defaults = told.get("defaults")
    values = {str(k): v for k, v in defaults.items()} if isinstance(defaults, Mapping) else {}
    if "defaults" in told and defaults is not None and not isinstance(defaults, Mapping):
        made.tell("defaults", REFUSED, "expected a mapping", defaults)
    template = told.get("command")
    used: set[str] = set()
    if template is None:
        argv = [word for key, value in values.items() for word in imported_flags.of_default(key, value)]
        used = {key for key, value in values.items() if imported_flags.of_default(key, value)}
        if "command" in told:
            made.tell("command", MAPPED, "empty: vLLM with the defaults as its options")
    elif not isinstance(template, str):
        made.tell("command", REFUSED, "expected text", template)
        argv = []
    else:
        argv = _words(made, template, {"model": told.get("model"), **values}, used)
    for key, value in values.items():
        name = f"defaults.{key}"
        in_words = key in used or str(key) == "model"
        made.tell(name, MAPPED if in_words else KEPT,
                  "through the command" if in_words else "nothing in the command uses it", value)  # fmt: skip
    if "defaults" in told and not defaults and not isinstance(defaults, int | str | list):
        made.tell("defaults", MAPPED, "empty")
    for flag, value in imported_flags.pairs(argv):
        imported_flags.apply(made, flag, value)


def _words(made: Imported, template: str, values: Mapping[str, Any], used: set[str]) -> list[str]:
    """The argv of a command, with its values filled in; refused whole when it is no plain `vllm serve`."""
    text = fill(template, values, used)
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        made.tell("command", REFUSED, f"cannot be split into words: {error}", template)
        used.clear()
        return []
    start = next((at for at, word in enumerate(words) if word == "serve" and at and words[at - 1].endswith("vllm")), 0)
    if not start:
        made.tell("command", REFUSED, "it is no `vllm serve ...`: " + _OTHER_ENGINE, template)
        used.clear()
        return []
    before = words[: start - 1]
    more = next((at for at, word in enumerate(words) if word in ("&&", "||", ";", "|", "&", ">", ">>")), len(words))
    if before or more < len(words):
        around = " ".join([*before, *words[more:]])
        made.tell("command.around", REFUSED, "no shell runs here, before `vllm serve` or after it", around)
    made.tell("command", MAPPED, "serve")
    rest = words[start + 1 : more]
    if rest and not rest[0].startswith("-"):
        positional = rest.pop(0)
        if not made.data["model"]:
            set_model(made, "command.model", positional)
    return rest


def fill(template: str, values: Mapping[str, Any], used: set[str]) -> str:
    """A template with its `{key}` replaced, in as many passes as sparkrun makes; `{{` anywhere means doubled braces.

    An unknown `{key}` stays as it is.
    """
    doubled = "{{" in template
    text, pattern = template, DOUBLED if doubled else SINGLE

    def value_of(match: re.Match[str]) -> str:
        key = match[1]
        if key is None:
            return "\1" if match[0] == "{{" else "\2"
        if key not in values or values[key] is None:
            return match[0]
        used.add(key)
        value = values[key]
        return json.dumps(value) if isinstance(value, bool | Mapping | list) else str(value)

    for _ in range(PASSES):
        filled = pattern.sub(value_of, text)
        if filled == text or len(filled) > 1 << 16:
            break
        text, pattern = filled, SINGLE
    return text.replace("\1", "{").replace("\2", "}") if doubled else text


def _settle(made: Imported) -> None:
    """Take back what the kit's rules refuse together, and put something where weights must be named."""
    parallel, serve, model = made.data.get("parallel", {}), made.data.get("serve", {}), made.data["model"]
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    if world % parallel.get("nodes", 1):
        made.tell("parallel.nodes", REFUSED, f"{world} ranks do not divide over the nodes", parallel.pop("nodes"))
    if parallel.get("expert") and parallel.get("tensor", 1) == 1:
        made.tell("parallel.expert", REFUSED, "they spread over tensor ranks", parallel.pop("expert"))
    if serve.get("max_num_batched_tokens", 1 << 30) < serve.get("max_num_seqs", 0):
        made.tell("serve.max_num_seqs", REFUSED, "more than max_num_batched_tokens", serve.pop("max_num_seqs"))
    if serve.get("max_model_len", 1 << 30) <= PROBE_TOKENS:
        made.tell("serve.max_model_len", REFUSED, "too short for the probe", serve.pop("max_model_len"))
    if serve.get("kv_cache_memory") and "gpu_memory_utilization" in serve:
        share = serve.pop("gpu_memory_utilization")
        made.tell("serve.gpu_memory_utilization", REFUSED, "--kv-cache-memory-bytes replaces it", share)
    if not model.get("repo") and not model.get("path"):
        model["path"] = NO_MODEL


def lacking(data: Mapping[str, Any]) -> Iterator[str]:
    """What is to be filled in before the recipe can be served."""
    model, image = data["model"], data["image"]
    if model.get("path") == NO_MODEL:
        yield f"model: repo or path, in the place of {NO_MODEL}"
    elif model.get("repo") and not model.get("revision"):
        yield "model.revision: the commit (`kit lock --update` lists the branches)"
    if not image.get("rates") and not str(image["vllm"]).endswith("+cpu"):
        yield "image: arch, rates and codebooks of the pack, for the GPUs at hand"


def as_yaml(made: Imported, source: str) -> str:
    """The recipe as a file, with a first line that says where it comes from."""
    lines = [f"# Imported from {one_line(source)}; `kit recipe check` and docs/recipes.md say what may be set."]
    for key, value in made.data.items():
        if isinstance(value, dict) and value:
            lines.append(f"{key}:")
            lines += [f"  {name}: {recipe_view.write(item)}" for name, item in value.items()]
        elif value not in ({}, None):
            lines.append(f"{key}: {recipe_view.write(value)}")
    return "\n".join(lines) + "\n"


def foreign_file(made: Imported, original: Mapping[Any, Any]) -> str:
    """The original whole, as JSON, with what became of each key: nothing of it is lost."""
    report = [{"key": key, "outcome": outcome, "why": why} for key, outcome, why in made.report]
    fields = {"original": original, "kept": made.kept, "report": report, "missing": made.missing}
    return json.dumps(plain(fields), indent=2, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Data that JSON can hold: keys as text, dates and the like as YAML wrote them."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def unmapped(made: Imported) -> Iterator[str]:
    """Keys of the report that were not mapped."""
    yield from (key for key, outcome, _ in made.report if outcome != MAPPED)
