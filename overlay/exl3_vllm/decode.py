"""The torch reference decoder: trellis to weights, exactly as exllamav3's reconstruct does it.

This is the oracle: slow, plain, the same on every device. Formulas: a tile's 256 weights share a ring of 256 * bits
bits; weight t reads the 16 bits that end at bit floor((t + 1) * bits), and a codebook turns that 16-bit state into one
fp16 value.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from exl3_vllm.format import BLOCK, TILE

TILE_WEIGHTS = TILE * TILE
STATES = 1 << 16

# Multipliers of the three hash codebooks and the mask and pattern that turn a hash into two small fp16 numbers.
INST3_FACTOR, INST3_OFFSET = 89226354, 64248484
MCG_FACTOR = 0xCBAC1FED
MUL1_FACTOR = 0x83DCD12D
SIGN_AND_MANTISSA = 0x8FFF8FFF
EXPONENT_PATTERN = 0x3B603B60

CHUNK_WEIGHTS = 1 << 22
"""Weights decoded at once: the int32 states of 4 Mi weights are 16 MiB, so a 200 MB head needs no 1 GB of scratch."""


def _fp16(bits: Tensor) -> Tensor:
    """fp32 values of fp16 bit patterns given as int64."""
    signed = torch.where(bits >= STATES // 2, bits - STATES, bits)
    return signed.to(torch.int16).view(torch.float16).to(torch.float32)


@functools.cache
def codebook_values(codebook: str, device: torch.device | None = None) -> Tensor:
    """fp16 [65536]: the value of each state.

    Sums and the multiply-add are done in fp32, where they are exact (22 significant bits at most), so the conversion
    to fp16 is the single rounding of the hardware's hadd and hfma.
    """
    states = torch.arange(STATES, dtype=torch.int64, device="cpu")
    if codebook == "mul1":
        product = (states * MUL1_FACTOR) & 0xFFFFFFFF
        byte_sum = sum(((product >> shift) & 0xFF for shift in (0, 8, 16, 24)), torch.zeros_like(states))
        scale, offset = _fp16(torch.tensor([0x1EEE, 0xC931], dtype=torch.int64, device="cpu"))
        values = _fp16(byte_sum + 0x6400) * scale + offset
    elif codebook in ("3inst", "mcg"):
        product = states * INST3_FACTOR + INST3_OFFSET if codebook == "3inst" else states * MCG_FACTOR
        pattern = (product & SIGN_AND_MANTISSA) ^ EXPONENT_PATTERN
        values = _fp16(pattern & 0xFFFF) + _fp16((pattern >> 16) & 0xFFFF)
    else:
        raise ValueError(f"codebook {codebook!r} is none of 3inst, mcg, mul1")
    rounded: Tensor = values.to(torch.float16).to(device)
    return rounded


@functools.cache
def ring_to_tile(device: torch.device | None = None) -> Tensor:
    """int64 [256]: for each element row * 16 + column of a tile, its position in the ring (the layout of mma B)."""
    ring = torch.arange(TILE_WEIGHTS, dtype=torch.int64, device="cpu")
    lane, slot = ring >> 3, ring & 7
    row = (lane % 4) * 2 + (slot & 1) + 8 * ((slot >> 1) & 1)
    column = lane // 4 + 8 * ((slot >> 2) & 1)
    return torch.argsort(row * TILE + column).to(device)


@functools.cache
def window_starts(half_bits: int) -> tuple[Tensor, Tensor]:
    """(word, shift), int64 and int32 [256]: the 16-bit word in which each window starts, and how far the window's
    last bit lies above bit 0 of the 32 bits that start there."""
    ends = ((torch.arange(TILE_WEIGHTS, dtype=torch.int64, device="cpu") + 1) * half_bits) >> 1
    start = (ends - 16) % (TILE_WEIGHTS // 2 * half_bits)
    return start // 16, (16 - start % 16).to(torch.int32)


def unpack_states(trellis: Tensor) -> Tensor:
    """States, int32 [..., 256] in ring order, of a trellis int16 [..., 8 * half_bits]."""
    words = trellis.shape[-1]
    word, shift = (index.to(trellis.device) for index in window_starts(words // 8))
    # The stream is read from little-endian 32-bit words, highest bit first: halfwords swap places within each pair.
    stream = trellis.reshape(*trellis.shape[:-1], words // 2, 2).flip(-1).flatten(-2).to(torch.int32) & 0xFFFF
    wide = (stream[..., word] << 16) | stream[..., (word + 1) % words]
    states: Tensor = (wide >> shift) & 0xFFFF
    return states


def inner_weight(trellis: Tensor, codebook: str) -> Tensor:
    """Weights in the rotated basis, fp16 [K, N], of a trellis int16 [K/16, N/16, 8 * half_bits]."""
    rows, columns, _ = trellis.shape
    values = codebook_values(codebook, trellis.device)
    order = ring_to_tile(trellis.device)
    out = torch.empty((rows * TILE, columns * TILE), dtype=torch.float16, device=trellis.device)
    step = max(1, CHUNK_WEIGHTS // (columns * TILE_WEIGHTS))
    for first in range(0, rows, step):
        tiles = values[unpack_states(trellis[first : first + step])][..., order]
        block = tiles.reshape(-1, columns, TILE, TILE).transpose(1, 2).reshape(-1, columns * TILE)
        out[first * TILE : first * TILE + block.shape[0]] = block
    return out


@functools.cache
def hadamard(device: torch.device | None = None) -> Tensor:
    """fp32 [128, 128]: the Sylvester Hadamard matrix over sqrt(128); symmetric and its own inverse."""
    matrix = torch.ones((1, 1), dtype=torch.float32, device="cpu")
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    scaled: Tensor = (matrix / BLOCK**0.5).to(device)
    return scaled


def rotate(x: Tensor) -> Tensor:
    """x H for each block of 128 along the last dimension; fp32 in the shape of x."""
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    rotated: Tensor = (blocks @ hadamard(x.device)).flatten(-2)
    return rotated


def unpack_signs(packed: Tensor) -> Tensor:
    """fp16 [16 * words] of +1 and -1 from the legacy scales int16 [words]: bit i of word j set means -1 at 16 j + i."""
    bits = (packed.to(torch.int32)[:, None] >> torch.arange(16, dtype=torch.int32, device=packed.device)) & 1
    return (1 - 2 * bits).flatten().to(torch.float16)


def dequantise(trellis: Tensor, suh: Tensor, svh: Tensor, codebook: str) -> Tensor:
    """The matrix in the original basis, fp32 [K, N]: diag(suh) H W H diag(svh).

    trellis int16 [K/16, N/16, 8 * half_bits]; suh fp16 [K]; svh fp16 [N].
    """
    weight = inner_weight(trellis, codebook).to(torch.float32)
    weight = rotate(weight.t()).t() * suh.to(torch.float32)[:, None]
    return rotate(weight) * svh.to(torch.float32)


def forward(x: Tensor, trellis: Tensor, suh: Tensor, svh: Tensor, codebook: str, bias: Tensor | None = None) -> Tensor:
    """y fp32 [rows, N] of x [rows, K] through the rotated basis, in fp32 throughout: ((x suh) H W) H svh + bias."""
    rotated = rotate(x.to(torch.float32) * suh.to(torch.float32))
    y = rotate(rotated @ inner_weight(trellis, codebook).to(torch.float32)) * svh.to(torch.float32)
    return y if bias is None else y + bias.to(torch.float32)
