"""Memory admission: what each rank will take, held against what its node has free, before 100 GiB are loaded.

Pure: recipe, the checkpoint's headers and config in, bytes out; `kit plan` shows the same numbers. Weights and KV cache
are counted exactly; activation, graphs and context are estimates on the large side, each with its source beside it.

vLLM's rule: it takes `gpu_memory_utilization` of the whole memory and refuses when that is not free at its start; what
weights, activation, scratch and graphs leave of it becomes KV cache, which must hold one request of `max_model_len`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl3kit.probe import Probe
    from exl3kit.recipe import Recipe

MIB, GIB = 1 << 20, 1 << 30

UTILIZATION = 0.92  # vLLM's defaults (0.32, 0.33), which a recipe leaves by naming nothing
BATCHED_TOKENS, SEQUENCES = 8192, 1024  # its largest for one GPU: an estimate must not be below the truth
KV_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
SPARSE_FP8_ROW = 656  # bytes of a token in vLLM's fp8_ds_mla: 512 values, their scales, and room for a 16-bit rope
BLOCK = 128
# Of the overlay's path through cuBLAS: columns of a matrix that is kept whole, most pieces of a wider one, and rows and
# bytes of fp32 sums of one product.
WIDEST, PIECES, CHUNK_ROWS, CHUNK_BYTES = 32768, 4, 2048, 128 << 20
APART_TOKENS = 1024  # of a step of experts that do not share their input scales
ROW_INDEX = 20  # bytes that sort a routed row: its token, its expert, its place, and two scales
GRAPHS = 1 * GIB  # captured graphs and their pool: 0.5 to 1 GiB for up to 512 rows
CONTEXT_GPU = 1 * GIB + 512 * MIB  # CUDA context, NCCL buffers, cuBLAS workspaces
PROCESS = 1280 * MIB  # host side of a rank: 1.2 GB resident for vLLM's processes of one CPU rank
RESERVE_UNIFIED = 4 * GIB  # left to a machine whose GPU shares its memory: it locks up rather than refuse
RESERVE_CPU = 512 * MIB
STEP = 0.01  # in which a utilisation is proposed
LENGTH_STEP = 256  # and a length


@dataclass(frozen=True)
class Sizes:
    """A checkpoint as its headers tell it, in bytes as stored; `manifest.survey` counts them."""

    cut: int  # of tensors that tensor ranks share among them
    whole: int  # of tensors that each rank holds whole: norms, routers, latent projections
    trellis: int  # of `cut`: packed
    trellis_weights: int  # weights that these stand for
    largest_in: int  # inputs and outputs of the largest packed matrix
    largest_out: int

    @classmethod
    def of(cls, found: Mapping[str, int]) -> Sizes:
        return cls(**{name: int(found[name]) for name in cls.__annotations__})


@dataclass(frozen=True)
class RankPlan:
    """What one rank takes, in bytes. `kv` is one request of the longest length; `kv_token` one token more of it.

    `kv_named`: the KV cache that the recipe names (`serve.kv_cache_memory`), 0 when it leaves vLLM what is left.
    """

    weights: int
    kv: int
    kv_token: int
    activation: int
    scratch: int
    graphs: int
    context: int
    max_model_len: int
    kv_named: int = 0

    @property
    def kv_cache(self) -> int:
        """What vLLM is given, at least: one request, or more where the recipe says so."""
        return max(self.kv, self.kv_named)

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.activation + self.scratch + self.graphs + self.context

    def as_fields(self) -> dict[str, int]:
        return {**self.__dict__, "kv_cache": self.kv_cache, "total": self.fixed + self.kv_cache}


def rank_plan(recipe: Recipe, sizes: Sizes, config: Mapping[str, Any]) -> RankPlan:
    """The plan of the largest rank of a recipe's gang.

    Parameters
    ----------
    config: the checkpoint's config.json.
    """
    shape = shape_of(config)
    serve, parallel = recipe.serve, recipe.parallel
    rows = serve.max_num_batched_tokens or BATCHED_TOKENS
    sequences = serve.max_num_seqs or SEQUENCES
    length = serve.max_model_len or number(shape, "max_position_embeddings") or 2048
    per_token, fixed = kv_bytes(recipe, config)
    on_cpu = recipe.image.on_cpu
    decoded = on_cpu or recipe.exl3.tier == "none"
    return RankPlan(
        weights=weight_bytes(sizes, parallel.tensor, parallel.pipeline, decoded=decoded),
        kv=length * per_token + fixed,
        kv_token=per_token,
        activation=activation_bytes(shape, rows, sequences, parallel.tensor),
        scratch=0 if decoded else scratch_bytes(recipe, sizes, shape, rows),
        graphs=0 if on_cpu or serve.enforce_eager else GRAPHS,
        context=PROCESS if on_cpu else CONTEXT_GPU,
        max_model_len=length,
        kv_named=serve.kv_cache_memory or 0,
    )


def weight_bytes(sizes: Sizes, tensor: int, pipeline: int, *, decoded: bool) -> int:
    """Weights of one rank; without kernels a trellis becomes 16-bit weights when it is loaded."""
    cut = sizes.cut - sizes.trellis + (2 * sizes.trellis_weights if decoded else sizes.trellis)
    return math.ceil((cut / tensor + sizes.whole) / pipeline)


def kv_bytes(recipe: Recipe, config: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of KV cache on one rank: for each token of a request, and for each request however long it is."""
    shape = shape_of(config)
    serve = recipe.serve
    element = 1 if serve.kv_cache_dtype in KV_FP8 else 4 if serve.dtype == "float32" else 2
    layers = number(shape, "num_hidden_layers") or 1
    stage = math.ceil(layers / recipe.parallel.pipeline) / layers
    full, window, state = layer_kinds(shape, layers)
    latent = number(shape, "kv_lora_rank")
    if latent:  # MLA: one latent vector a token, whole on each rank
        token = (latent + (number(shape, "qk_rope_head_dim") or 0)) * element
        indexer = number(shape, "index_head_dim")  # sparse attention keeps an fp8 key and its scale beside it
        if indexer and element == 1:
            token = SPARSE_FP8_ROW
        if indexer:  # one for each pool of tokens, where the model pools them
            token += math.ceil((indexer + 4) / (number(shape, "index_kpool") or 1))
    else:
        heads = number(shape, "num_key_value_heads", "num_attention_heads") or 1
        token = 2 * max(1, heads // recipe.parallel.tensor) * _head_dim(shape) * element
    span = min(number(shape, "sliding_window") or 0, serve.max_model_len or 1 << 30)
    fixed = window * span * token + state * _state_bytes(shape, recipe.parallel.tensor)
    return math.ceil(full * stage * token), math.ceil(fixed * stage)


def layer_kinds(shape: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Layers that attend to all tokens, to a window of them, and those that keep a state instead."""
    linear = shape.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("kda_layers"), Sequence):
        state = len(linear["kda_layers"])
        return layers - state, 0, state
    kinds = shape.get("layer_types")
    if not isinstance(kinds, Sequence) or isinstance(kinds, str):
        every = number(shape, "full_attention_interval")
        full = layers // every if every else layers
        return full, 0, layers - full
    window, state = kinds.count("sliding_attention"), kinds.count("linear_attention")
    return layers - window - state, window, state


def _state_bytes(shape: Mapping[str, Any], tensor: int) -> int:
    """The recurrent state of one linear-attention layer, fp32: heads x key width x value width."""
    linear = shape.get("linear_attn_config")
    own: Mapping[str, Any] = linear if isinstance(linear, Mapping) else shape
    heads = number(own, "num_heads", "linear_num_value_heads") or 0
    key = number(own, "head_dim", "linear_key_head_dim") or 0
    value = number(own, "head_dim", "linear_value_head_dim") or 0
    return 4 * heads * key * value // tensor


def activation_bytes(shape: Mapping[str, Any], rows: int, sequences: int, tensor: int) -> int:
    """The peak of one step in 16 bits: residual, norm, attention in and out, gate, up and their product; and logits.

    Logits are kept in fp32 next to their 16-bit original, for one row of each request.
    """
    hidden = number(shape, "hidden_size") or 0
    experts = (number(shape, "moe_intermediate_size") or 0) * (number(shape, "num_experts_per_tok") or 0)
    wide = max(number(shape, "intermediate_size") or 0, experts)
    logits = min(sequences, rows) * (number(shape, "vocab_size") or 0) * 6
    return rows * (6 * hidden + 3 * math.ceil(wide / tensor)) * 2 + logits


def scratch_bytes(recipe: Recipe, sizes: Sizes, shape: Mapping[str, Any], rows: int) -> int:
    """The arena of the EXL3 kernels: a matrix that is decoded for cuBLAS, or a step's rows sorted by expert.

    The first is what the kernels ask for, to the byte, where ranks share the outputs.
    """
    parallel = recipe.parallel
    never = recipe.exl3.prefill_reconstruct_m == 0
    dense = 0 if never else written_out(sizes.largest_in, math.ceil(sizes.largest_out / parallel.tensor), rows)
    chosen = number(shape, "num_experts_per_tok", "moe_top_k") or 0
    inner = number(shape, "moe_intermediate_size", "intermediate_size") or 0
    if not parallel.expert:
        inner = math.ceil(inner / BLOCK / parallel.tensor) * BLOCK
    return max(dense, sorted_rows(rows, chosen, number(shape, "hidden_size") or 0, inner) if chosen else 0)


def sorted_rows(tokens: int, chosen: int, hidden: int, inner: int) -> int:
    """Bytes for a step of a layer of experts, whichever way of it takes more.

    Where all experts of a layer share their input scales, each token is rotated once; elsewhere each routed row is,
    for gate and for up, with fp32 sums, and at most 1,024 tokens are taken at a time. The first tensors say which.
    """
    once = 2 * tokens * hidden + 2 * tokens * chosen * (inner + hidden)
    each = min(tokens, APART_TOKENS) * chosen * (6 * hidden + 10 * inner)
    return max(once, each) + ROW_INDEX * tokens * chosen


def written_out(inputs: int, outputs: int, rows: int) -> int:
    """Bytes for one piece of a matrix in fp16, and a chunk of rows on the way through cuBLAS with fp32 sums."""
    blocks = math.ceil(outputs / BLOCK)
    columns = math.ceil(blocks / max(1, min(PIECES, math.ceil(outputs / WIDEST)))) * BLOCK
    chunk = min(rows, CHUNK_ROWS, max(256, CHUNK_BYTES // (4 * max(1, columns)) // BLOCK * BLOCK))
    return 2 * inputs * columns + chunk * (2 * inputs + 4 + 4 * columns) if inputs else 0


def shape_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def number(shape: Mapping[str, Any], *names: str) -> int | None:
    values = (shape.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _head_dim(shape: Mapping[str, Any]) -> int:
    given = number(shape, "head_dim")
    return given or (number(shape, "hidden_size") or 0) // (number(shape, "num_attention_heads") or 1)


# ---- a plan against a node -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Memory of one node that ranks can get, in bytes: each of `ranks` takes from the same `total`."""

    node: str
    total: int
    available: int
    reserve: int  # of `available`, left to the rest of the machine
    ranks: int


@dataclass(frozen=True)
class Verdict:
    """Whether a node has room; `says` is a sentence, and `fix` what would fit."""

    node: str
    fits: bool
    says: str
    fix: str | None = None
    utilization: float | None = None  # the largest that fits
    max_model_len: int | None = None  # the largest that fits


def room_of(node: str, probe: Probe, ranks: int, *, on_cpu: bool) -> Room:
    """The memory that `ranks` ranks on a node share."""
    memory = probe.memory
    if on_cpu:
        return Room(node, memory.total, memory.available, RESERVE_CPU, ranks)
    own = [gpu for gpu in probe.gpus if gpu.memory_total is not None]
    if own:  # each rank has its own GPU: the smallest decides
        smallest = min(own, key=lambda gpu: gpu.memory_free or 0)
        return Room(node, smallest.memory_total or 0, smallest.memory_free or 0, 0, 1)
    return Room(node, memory.total, memory.available, RESERVE_UNIFIED, ranks)


def admit(recipe: Recipe, plan: RankPlan, room: Room) -> Verdict:
    """Hold a plan against a node."""
    budget = max(0, room.available - room.reserve) // room.ranks
    if recipe.serve.kv_cache_memory is not None:
        return _admit_fixed(recipe.serve.kv_cache_memory, plan, room, budget)
    asked = recipe.serve.gpu_memory_utilization or UTILIZATION
    wanted = math.ceil(asked * room.total)
    most = min(math.floor(budget / room.total / STEP + 1e-9) * STEP, 1.0)
    length = _longest(math.floor(min(most, asked) * room.total), plan)
    free = f"{gib(budget)} are free for it on {room.node}"
    if wanted <= budget and wanted >= plan.fixed + plan.kv:
        return Verdict(room.node, True, f"{describe(plan)} of {gib(wanted)}; {free}", None, most, length)
    if most * room.total >= plan.fixed + plan.kv:
        says = f"gpu_memory_utilization {asked:g} is {gib(wanted)} per rank, and {free}"
        if wanted <= budget:
            says = f"gpu_memory_utilization {asked:g} is {gib(wanted)} per rank, less than the {describe(plan)}"
        return Verdict(
            room.node, False, says, f"`--set serve.gpu_memory_utilization={most:.2f}`", round(most, 2), length
        )
    says = f"{describe(plan)}, {gib(plan.fixed + plan.kv)} in all per rank, and {free}"
    longest = _longest(math.floor(most * room.total), plan)
    if longest is None:
        return Verdict(room.node, False, says, _smaller(plan), round(most, 2))
    fix = f"`--set serve.gpu_memory_utilization={most:.2f} --set serve.max_model_len={longest}`"
    return Verdict(room.node, False, says, fix, round(most, 2), longest)


def _admit_fixed(kv: int, plan: RankPlan, room: Room, budget: int) -> Verdict:
    """A recipe that names the size of its KV cache."""
    longest = _longest(plan.fixed + kv, plan)
    free = f"{gib(budget)} are free for it on {room.node}"
    if kv < plan.kv:
        says = f"kv_cache_memory is {gib(kv)}, and {one_request(plan)}"
        fix = f"`--set serve.max_model_len={longest}`" if longest else "a larger serve.kv_cache_memory"
        return Verdict(room.node, False, says, fix, None, longest)
    if plan.fixed + kv <= budget:
        return Verdict(room.node, True, f"{describe(plan)}; {free}", None, None, longest)
    says = f"{describe(plan)}, {gib(plan.fixed + kv)} in all per rank, and {free}"
    largest = (budget - plan.fixed) // MIB
    fits = largest * MIB >= plan.kv
    fix = f"`--set serve.kv_cache_memory={largest}MiB`" if fits else _smaller(plan)
    return Verdict(room.node, False, says, fix)


def _longest(memory: int, plan: RankPlan) -> int | None:
    """The longest request whose KV cache fits into `memory` beside the rest; at most the plan's own length."""
    constant = plan.kv - plan.max_model_len * plan.kv_token
    if not plan.kv_token or memory >= plan.fixed + plan.kv:
        return plan.max_model_len
    tokens = (memory - plan.fixed - constant) // plan.kv_token
    return int(tokens // LENGTH_STEP * LENGTH_STEP) or None if tokens > 0 else None


def _smaller(plan: RankPlan) -> str:
    if plan.scratch + plan.activation > plan.weights:
        return "a smaller serve.max_num_batched_tokens: scratch and activation are the larger part"
    return "end what else runs there, or spread the model over more ranks"


def describe(plan: RankPlan) -> str:
    """The parts of a plan in words."""
    parts = {"weights": plan.weights, "KV cache": plan.kv_cache, "activation": plan.activation,
             "scratch": plan.scratch, "graphs": plan.graphs, "context": plan.context}  # fmt: skip
    needs = {"KV cache": f" ({one_request(plan)})"} if plan.kv_cache > plan.kv else {}
    return ", ".join(f"{name} {gib(size)}{needs.get(name, '')}" for name, size in parts.items() if size)


def one_request(plan: RankPlan) -> str:
    return f"one request of {plan.max_model_len} tokens needs {gib(plan.kv)}"


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / MIB:.1f} MiB"
