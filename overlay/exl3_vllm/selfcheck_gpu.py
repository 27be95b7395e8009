"""The tiers and their account on a real GPU: one layer of experts, every counter foretold.

`python -m exl3_vllm.selfcheck_gpu` on a machine with a GPU and the kernels. `selfcheck_tiers` does the same with the
reference and needs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl3_vllm import decode, kernels
from exl3_vllm.arena import ARENA
from exl3_vllm.diagnostics import Diagnostics
from exl3_vllm.experts import DecodedExperts, Plan, Scratch, run_experts
from exl3_vllm.gpu import PackedExperts
from exl3_vllm.packed_ops import PackedPart
from exl3_vllm.tiers import GROUPED_SYMBOLS, KERNEL_SYMBOLS, resolve

EXPERTS, HIDDEN, WIDTH, CAP = 4, 256, 128, 8
TOKENS, FAT_ROWS, THIN_ROWS = 40, 37, 3  # two experts get 37 rows each, two get 3 each
LIMIT = 8e-4
"""Relative L2 to fp64 (bar K7 for experts)."""

SYMBOLS = (*KERNEL_SYMBOLS, *GROUPED_SYMBOLS)


def matrix(rows: int, columns: int, seed: int, suh: Tensor | None = None) -> PackedPart:
    """Random bits at 4 bits per weight; outputs about as large as inputs."""
    half_bits, codebook = instance()
    generator = torch.Generator().manual_seed(seed)
    shape = (rows // 16, columns // 16, 8 * half_bits)
    trellis = torch.randint(0, 1 << 16, shape, generator=generator).to(torch.int32).to(torch.int16)
    if suh is None:
        suh = (torch.rand(rows, generator=generator) + 0.5).half()
    svh = ((torch.rand(columns, generator=generator) + 0.5) / rows**0.5).half()
    return PackedPart(trellis.cuda(), suh.cuda(), svh.cuda(), codebook, 0, columns)


def instance() -> tuple[int, str]:
    """A rate in whole bits, and its codebook, that the loaded library holds; 4 bits mcg where it can be."""
    held = [(half, code) for half, code in kernels.load() if half % 2 == 0]
    half, code = (8, 1) if (8, 1) in held else held[0]
    return half, next(name for name, number in kernels.CODEBOOKS.items() if number == code)


@dataclass
class Rehearsal:
    """One layer with its own account and scratch, and the same layer in fp64."""

    packed: PackedExperts
    reference: DecodedExperts
    account: Diagnostics

    @classmethod
    def make(cls, shared_suh: bool = True) -> Rehearsal:
        suh = (torch.rand(HIDDEN, generator=torch.Generator().manual_seed(9)) + 0.5).half()
        same = suh if shared_suh else None
        gate, up = ([matrix(HIDDEN, WIDTH, s + e, same) for e in range(EXPERTS)] for s in (10, 20))
        down = [matrix(WIDTH, HIDDEN, 30 + e) for e in range(EXPERTS)]
        account = Diagnostics()
        stacked = [torch.cat([_dense(g), _dense(u)]) for g, u in zip(gate, up, strict=True)]
        reference = DecodedExperts(torch.stack(stacked), torch.stack([_dense(one) for one in down]), None)
        return cls(PackedExperts(gate, up, down, None, Scratch(account)), reference, account)

    def call(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs whose last three tokens go to experts 2 and 3, all others to 0 and 1."""
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(6)).cuda()
        thin = min(THIN_ROWS, tokens)
        ids = torch.tensor([[0, 1]] * (tokens - thin) + [[2, 3]] * thin, dtype=torch.int32).cuda()
        return x, torch.full(ids.shape, 0.5, device="cuda"), ids

    def run(self, tokens: int, tier: str, *, shared_suh: bool = True, row_tile: int = 0) -> Tensor:
        plan = Plan(resolve(tier, shared_suh, SYMBOLS), CAP, row_tile)
        return self.packed.run(*self.call(tokens), plan, self.account)

    def error(self, y: Tensor, tokens: int) -> float:
        x, weights, ids = self.call(tokens)
        plan = Plan(resolve("legacy", True, ()), CAP, 0)
        aside = Diagnostics()
        args = (x.double().cpu(), weights.double().cpu(), ids.long().cpu(), self.reference, plan, Scratch(aside), aside)
        wanted = run_experts(*args)
        return float(torch.linalg.norm(y.double().cpu() - wanted) / torch.linalg.norm(wanted))


def _dense(part: PackedPart) -> Tensor:
    """fp64 [outputs, inputs] by the reference decoder."""
    stored = (part.trellis.cpu(), part.suh.cpu(), part.svh.cpu())
    return decode.dequantise(*stored, part.codebook).double().t().contiguous()


def wrong_account() -> Iterator[str]:
    """The expectations of the kernel tier, in the order of their contract."""
    layer = Rehearsal.make()
    y = layer.run(TOKENS, "kernel")
    first = layer.account.report()
    yield from differing("a kernel prefill", first, {
        "prefill_layer_calls": 1, "fallback_calls": {"kernel": 1}, "fallback_reasons": {"kernel_ok": 1},
        "direct_calls": 2, "scatter_calls": 2, "fat_expert_runs": 2, "fat_scratch_allocs": 1,
        "thin_calls": 0, "row_tile_calls": 0, "fat_layers": 1, "fat_expert_slots": 2, "max_rows": FAT_ROWS,
        "rows_expected": 2 * TOKENS, "rows_handled": {"kernel": 2 * FAT_ROWS, "thin": 2 * THIN_ROWS},
    })  # fmt: skip
    if not first["fat_scratch_bytes"] == first["fat_scratch_peak_bytes"] > 0:
        yield f"scratch: {first['fat_scratch_bytes']} bytes now, {first['fat_scratch_peak_bytes']} at most"
    yield from too_far("the kernel tier", layer.error(y, TOKENS))
    layer.run(CAP, "kernel")
    if layer.account.report() != first:
        yield "a decode call changed the account of prefill"
    layer.account.reset()
    layer.run(TOKENS, "kernel", row_tile=5)
    yield from differing("a prefill in row tiles", layer.account.report(), {
        "row_tile_calls": 1, "fallback_calls": {"row_tile": 1}, "fallback_reasons": {"row_tile_preempts_fat": 1},
        "direct_calls": 0, "scatter_calls": 0, "rows_handled": {"row_tile": 2 * TOKENS},
    })  # fmt: skip
    own = Rehearsal.make(shared_suh=False)
    y = own.run(TOKENS, "kernel", shared_suh=False)
    yield from differing("a prefill without shared scales", own.account.report(), {
        "fallback_calls": {"sorted": 1}, "fallback_reasons": {"degraded_shared_suh": 1},
        "direct_calls": 0, "scatter_calls": 0, "rows_handled": {"sorted": 2 * TOKENS},
    })  # fmt: skip
    yield from too_far("a layer without shared scales", own.error(y, TOKENS))


def wrong_tiers() -> Iterator[str]:
    """Every tier gives the same sums, and grouped counts its rows."""
    for tier in ("legacy", "sorted", "batched", "grouped"):
        layer = Rehearsal.make()
        yield from too_far(f"the {tier} tier", layer.error(layer.run(TOKENS, tier), TOKENS))
        handled = {"grouped": 2 * TOKENS} if tier == "grouped" else {tier: 2 * FAT_ROWS, "thin": 2 * THIN_ROWS}
        yield from differing(f"a {tier} prefill", layer.account.report(), {
            "fallback_calls": {tier: 1}, "rows_handled": handled, "rows_expected": 2 * TOKENS,
            "grouped_calls": int(tier == "grouped"), "direct_calls": 0,
        })  # fmt: skip
        yield from too_far(f"decode under {tier}", layer.error(layer.run(CAP, tier), CAP))


def wrong_capture() -> Iterator[str]:
    """A capture that would need memory of its own is refused, with the key; so is a tier that counts on the host."""
    layer = Rehearsal.make()
    for tier, word in (("kernel", "can not be captured"), ("grouped", "and 0 are prepared")):
        plan, call = Plan(resolve(tier, True, SYMBOLS), CAP, 0), layer.call(TOKENS)
        layer.packed.run(*call, plan, layer.account)
        held, ARENA._memory = ARENA._memory, None
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer.packed.run(*call, plan, layer.account)
            yield f"a capture of the {tier} tier without an arena was not refused"
        except RuntimeError as error:
            if word not in str(error):
                yield f"a capture of the {tier} tier was refused with {str(error)[:200]!r}"
        finally:
            ARENA._memory = held


def differing(what: str, account: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for key, value in wanted.items():
        if account.get(key) != value:
            yield f"{what} reports {key} = {account.get(key)!r}, expected {value!r}"


def too_far(what: str, error: float) -> Iterator[str]:
    if not error <= LIMIT:
        yield f"{what} is {error:.1e} from fp64, more than {LIMIT:.0e}"


def problems() -> list[str]:
    """Every expectation that is not met, as a sentence."""
    return [*wrong_account(), *wrong_tiers(), *wrong_capture()]


def main() -> int:
    told = problems()
    for sentence in told:
        print(f"selfcheck: {sentence}", file=sys.stderr)
    if not told:
        print(f"selfcheck: every tier and counter is right on {torch.cuda.get_device_name()}")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
