"""From weights to a trellis: the packer, and a small quantiser for fixtures.

The quantiser is a plain tail-biting Viterbi search per tile without calibration: as good as the format allows on
Gaussian weights, slow (a 128 x 128 matrix takes seconds), and meant for tests, not for publishing models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl3_vllm import decode
from exl3_vllm.format import BLOCK, TILE

STATES = 1 << 16


def pack_states(states: Tensor, half_bits: int) -> Tensor:
    """Trellis int16 [..., 8 * half_bits] of the states int32 [..., 256] of each tile, in ring order.

    Only the newest bits of each state are stored; the others are those of the states before it, which must agree (see
    `is_ring`).
    """
    ring = 128 * half_bits
    ends = ((torch.arange(TILE * TILE) + 1) * half_bits) >> 1
    stream = torch.zeros((*states.shape[:-1], ring), dtype=torch.int32)
    previous = 0
    for step, end in enumerate(ends.tolist()):
        for bit in range(end - previous):
            stream[..., end - 1 - bit] = (states[..., step] >> bit) & 1
        previous = end
    places = torch.arange(15, -1, -1, dtype=torch.int32)
    words = (stream.reshape(*states.shape[:-1], ring // 16, 16) << places).sum(-1)
    # Halfwords swap places within each 32-bit word, as in `decode.unpack_states`.
    swapped = words.reshape(*words.shape[:-1], -1, 2).flip(-1).reshape(words.shape)
    return swapped.to(torch.int32).to(torch.int16)


def is_ring(states: Tensor, half_bits: int) -> bool:
    """Whether every state continues the one before it, and the first one the last."""
    ends = ((torch.arange(TILE * TILE) + 1) * half_bits) >> 1
    fresh = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype)).to(torch.int32)
    before = torch.roll(states, 1, -1)
    return bool(torch.equal(((before << fresh) & 0xFFFF) >> fresh, states >> fresh))


def search_tile(values: Tensor, bits: int, codebook: Tensor) -> Tensor:
    """States int64 [256] whose values come closest to `values` fp32 [256] (ring order) and which close to a ring.

    Two passes of Viterbi over the 65536 states: the first starts half way round to find a good state for the seam, the
    second is bound to begin and end there.
    """
    turned = torch.roll(values, -TILE * TILE // 2)
    seam = int(_viterbi(turned, bits, codebook, None)[TILE * TILE // 2 - 1])
    return _viterbi(values, bits, codebook, seam)


def _viterbi(values: Tensor, bits: int, codebook: Tensor, seam: int | None) -> Tensor:
    """The cheapest path; with a seam, one that begins after that state and ends in one with the same memory.

    A step drops the top `bits` bits of a state and appends new ones, so its predecessors differ in the top bits alone:
    2^bits of them for each memory of 16 - bits bits.
    """
    choices, memory = 1 << bits, STATES >> bits
    states = torch.arange(STATES).reshape(memory, choices)  # [memory kept, new bits]
    cost = torch.zeros(memory)
    if seam is not None:
        cost = torch.full((memory,), torch.inf)
        cost[seam % memory] = 0
    best: list[Tensor] = []
    for value in values:
        total = cost[:, None] + (codebook[states] - value) ** 2
        by_next = total.reshape(choices, memory)  # a state's next memory is its low bits: state % memory
        cost, came = by_next.min(0)
        best.append(came)
    at = int(cost.argmin()) if seam is None else seam % memory
    path = []
    for came in reversed(best):
        state = int(came[at]) * memory + at
        path.append(state)
        at = state // choices
    return torch.tensor(path[::-1])


def quantise(weight: Tensor, bits: int, codebook: str, seed: int = 0) -> dict[str, Tensor]:
    """Stored parts (trellis, suh, svh) of a weight fp32 [K, N], both multiples of 128, at a whole number of bits.

    Random signs and the Hadamard make the weight look Gaussian; rows and columns are scaled to the codebook's spread.
    """
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{rows} x {columns}: both must be multiples of {BLOCK}")
    generator = torch.Generator().manual_seed(seed)
    table = decode.codebook_values(codebook).float()
    signs = [torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0 for size in (rows, columns)]
    size = weight.square().mean(0).sqrt()
    svh = signs[1] * size / size.mean()
    turned = decode.rotate(weight / svh)
    suh = signs[0] * turned.square().mean(1).sqrt() / table.std()
    inner = decode.rotate((turned / suh[:, None]).t()).t()
    tiles = inner.reshape(rows // TILE, TILE, columns // TILE, TILE).transpose(1, 2).reshape(-1, TILE * TILE)
    to_ring = torch.argsort(decode.ring_to_tile())
    states = torch.stack([search_tile(tile[to_ring], bits, table) for tile in tiles])
    shaped = states.to(torch.int32).reshape(rows // TILE, columns // TILE, TILE * TILE)
    return {"trellis": pack_states(shaped, 2 * bits), "suh": suh.half(), "svh": svh.half()}
