"""Weights that are not here: a model's matrices counted from its published shape, `published.json`.

Pure but for reading that file. What a rank holds follows from the shape exactly; which matrices of a pack are EXL3 and
at which rate is what its makers say, or a guess that the file names as one. Headers, once they are here, replace it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import geometry
from exl3kit.admission import Sizes, layer_kinds, number, shape_of

if TYPE_CHECKING:
    from exl3kit.recipe import Recipe

FILE = Path(__file__).with_name("published.json")
HEAD_BITS = 6  # what converters give the head unless told otherwise
BLOCK = geometry.BLOCK
PLAIN = 16
EXPERTS = "routed experts"
Kind = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Matrix:
    """`count` matrices of one kind, [inputs, outputs], with `bits` per weight (16: not EXL3).

    `cut` is the width that tensor ranks share, inputs or outputs; 0 when each rank holds the whole.
    """

    part: str
    inputs: int
    outputs: int
    count: int
    bits: float
    cut: int = 0

    @property
    def weights(self) -> int:
        """As stored: EXL3 pads both widths to whole blocks."""
        if self.bits == PLAIN:
            return self.count * self.inputs * self.outputs
        return self.count * padded(self.inputs) * padded(self.outputs)

    @property
    def trellis(self) -> int:
        """Bytes of packed weights alone."""
        return 0 if self.bits == PLAIN else int(self.weights * self.bits) // 8

    @property
    def stored(self) -> int:
        """Bytes in the checkpoint; suh and svh are fp16."""
        if self.bits == PLAIN:
            return 2 * self.weights
        return self.trellis + self.count * 2 * (padded(self.inputs) + padded(self.outputs))

    def on_rank(self, tensor: int, *, expert: bool = False) -> int:
        """Bytes on the rank that holds most: blocks of 128 are never cut, so its share may be more than even."""
        if not self.cut:
            return self.stored
        if self.bits == PLAIN or (expert and self.part == EXPERTS):
            return math.ceil(self.stored / tensor)
        blocks = padded(self.cut) // BLOCK
        share = Fraction(math.ceil(blocks / tensor), blocks)
        whole = padded(self.inputs if self.cut == self.outputs else self.outputs)
        return math.ceil(self.trellis * share + self.count * 2 * (padded(self.cut) * share + whole))


@dataclass(frozen=True)
class Published:
    """A model as published: its configuration, who says so, its matrices, and its MoE layers."""

    name: str
    source: str
    config: Mapping[str, Any]
    matrices: tuple[Matrix, ...]
    moe_layers: int
    assumed: str | None = None

    @property
    def sizes(self) -> Sizes:
        """The same sums as a survey of the headers gives."""
        packed = [one for one in self.matrices if one.bits != PLAIN]
        cut = [one for one in self.matrices if one.cut]
        widths = [(padded(one.inputs), padded(one.outputs)) for one in packed]
        largest = max(widths, key=lambda one: one[0] * one[1], default=(0, 0))
        return Sizes(
            cut=sum(one.stored for one in cut),
            whole=sum(one.stored for one in self.matrices if not one.cut),
            trellis=sum(one.trellis for one in packed),
            trellis_weights=sum(one.weights for one in packed),
            largest_in=largest[0],
            largest_out=largest[1],
        )

    def parts(self, tensor: int, *, expert: bool = False) -> dict[str, int]:
        """Bytes per part on the rank that holds most."""
        found: dict[str, int] = {}
        for one in self.matrices:
            found[one.part] = found.get(one.part, 0) + one.on_rank(tensor, expert=expert)
        return found

    def moe_layer(self, tensor: int) -> int:
        """Packed bytes (trellis alone) of one MoE layer's routed experts on a rank; 0 without experts."""
        experts = sum(one.trellis for one in self.matrices if one.part == EXPERTS)
        return experts // tensor // self.moe_layers if self.moe_layers else 0


def padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK


@cache
def models() -> dict[str, dict[str, Any]]:
    """Every model of the file, by the name that repositories and folders bear."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))["models"])


def find(recipe: Recipe) -> Published | None:
    """The model that a recipe's repository or folder is named after; None when the file does not know it."""
    model = recipe.model
    named = (model.repo or (model.path.name if model.path else "")).lower()
    fitting = [name for name in models() if name.lower() in named]
    if not fitting:
        return None
    name = max(fitting, key=len)
    bits = float(min(recipe.image.rates, default=4))
    return of(name, models()[name], bits, decoded=recipe.exl3.tier == "none")


def of(name: str, entry: Mapping[str, Any], bits: float, *, decoded: bool = False) -> Published:
    """A model whose packed parts have `bits` per weight (the head 6, or `bits` where that is more)."""
    config = entry["config"]
    shape = shape_of(config)
    packed = () if decoded else tuple(entry["packed"])
    rates = {part: entry.get("head_bits", max(bits, HEAD_BITS)) if part == "head" else bits for part in packed}
    found = tuple(
        Matrix(part, inputs, outputs, count, rates.get(part, PLAIN), cut)
        for part, inputs, outputs, count, cut in matrices(shape)
    )
    return Published(name, entry["source"], config, found, moe_layers(shape), entry.get("why_packed"))


def moe_layers(shape: Mapping[str, Any]) -> int:
    layers = number(shape, "num_hidden_layers") or 0
    return layers - (number(shape, "first_k_dense_replace") or 0) if number(shape, *geometry.EXPERTS) else 0


def matrices(shape: Mapping[str, Any]) -> Iterator[Kind]:
    """Part, inputs, outputs, count and the width that ranks share (0: none), of every matrix of a text model.

    Left out: norms, convolutions, biases and gates of one number per head: a thousandth of the whole.
    """
    hidden, layers = number(shape, "hidden_size") or 0, number(shape, "num_hidden_layers") or 0
    vocabulary = number(shape, "vocab_size") or 0
    full, window, state = layer_kinds(shape, layers)
    yield "embedding", vocabulary, hidden, 1, vocabulary
    if not shape.get("tie_word_embeddings"):
        yield "head", hidden, vocabulary, 1, vocabulary
    yield from _attention(shape, hidden, full + window)
    if state:
        yield from _linear_attention(shape, hidden, state)
    yield from _mlp(shape, hidden, layers)


def _attention(shape: Mapping[str, Any], hidden: int, layers: int) -> Iterator[Kind]:
    heads = number(shape, "num_attention_heads") or 1
    latent = number(shape, "kv_lora_rank")
    if latent is None:
        width = number(shape, "head_dim") or hidden // heads
        queries = heads * width * (2 if shape.get("attn_output_gate") else 1)
        yield "attention", hidden, queries, layers, queries
        keys = (number(shape, "num_key_value_heads") or heads) * width
        yield "attention", hidden, keys, 2 * layers, keys
        yield "attention", heads * width, hidden, layers, heads * width
        return
    rope, nope = number(shape, "qk_rope_head_dim") or 0, number(shape, "qk_nope_head_dim") or 0
    value, query = number(shape, "v_head_dim") or 0, number(shape, "q_lora_rank") or hidden
    if query != hidden:
        yield "attention", hidden, query, layers, 0
    yield "attention", query, heads * (nope + rope), layers, heads * (nope + rope)
    yield "attention", hidden, latent + rope, layers, 0
    yield "attention", latent, heads * (nope + value), layers, heads * (nope + value)
    yield "attention", heads * value, hidden, layers, heads * value
    index = number(shape, "index_head_dim")
    if index:  # the indexer is whole on every rank
        yield "attention", query, index * (number(shape, "index_n_heads") or 1), layers, 0
        yield "attention", hidden, 2 * index + (number(shape, "index_n_heads") or 1), layers, 0


def _linear_attention(shape: Mapping[str, Any], hidden: int, layers: int) -> Iterator[Kind]:
    own = shape.get("linear_attn_config")
    if isinstance(own, Mapping):  # KDA: q, k, v, out, and two gates of low rank
        head = number(own, "head_dim") or 0
        width = head * (number(own, "num_heads") or 0)
        yield "linear attention", hidden, width, 3 * layers, width
        yield "linear attention", width, hidden, layers, width
        yield "linear attention", hidden, head, 2 * layers, 0
        yield "linear attention", head, width, 2 * layers, width
        return
    keys = (number(shape, "linear_num_key_heads") or 0) * (number(shape, "linear_key_head_dim") or 0)
    values = (number(shape, "linear_num_value_heads") or 0) * (number(shape, "linear_value_head_dim") or 0)
    yield "linear attention", hidden, 2 * keys + values, layers, 2 * keys + values
    yield "linear attention", hidden, values, layers, values
    yield "linear attention", values, hidden, layers, values


def _mlp(shape: Mapping[str, Any], hidden: int, layers: int) -> Iterator[Kind]:
    experts = number(shape, *geometry.EXPERTS)
    wide = number(shape, "intermediate_size") or 0
    if experts is None:
        yield "mlp", hidden, wide, 2 * layers, wide
        yield "mlp", wide, hidden, layers, wide
        return
    sparse = moe_layers(shape)
    if layers > sparse:
        yield "mlp", hidden, wide, 2 * (layers - sparse), wide
        yield "mlp", wide, hidden, layers - sparse, wide
    inner = number(shape, "moe_intermediate_size") or wide
    yield "router", hidden, experts, sparse, 0
    yield EXPERTS, hidden, inner, 2 * experts * sparse, inner
    yield EXPERTS, inner, hidden, experts * sparse, inner
    shared = (number(shape, "n_shared_experts") or 0) * inner
    if shared:
        yield "shared experts", hidden, shared, 2 * sparse, shared
        yield "shared experts", shared, hidden, sparse, shared
