"""The packer and the small quantiser against the decoder."""

from __future__ import annotations

import pytest
import torch
from exl3_vllm import decode, encode
from exl3_vllm.format import CODEBOOKS, HALF_BITS


@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_packing_undoes_unpacking_at_every_rate(half_bits: int) -> None:
    # given random bits, which are always a valid trellis
    generator = torch.Generator().manual_seed(half_bits)
    trellis = torch.randint(0, 1 << 16, (2, 3, 8 * half_bits), generator=generator).to(torch.int32).to(torch.int16)
    # when unpacked
    states = decode.unpack_states(trellis)
    # then each state continues the one before it, and packing gives the same bits
    assert encode.is_ring(states, half_bits)
    assert torch.equal(encode.pack_states(states, half_bits), trellis)
    states[0, 0, 5] ^= 1 << 15
    assert not encode.is_ring(states, half_bits)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_searched_tile_closes_to_a_ring_and_comes_close(codebook: str) -> None:
    table = decode.codebook_values(codebook).float()
    values = torch.randn(256, generator=torch.Generator().manual_seed(1)) * table.std()
    states = encode.search_tile(values, 4, table)
    assert encode.is_ring(states[None].to(torch.int32), 8)
    # 4 bits leave 0.46 % of the variance on Gaussian values (measured over 64 tiles); one tile varies
    assert ((table[states] - values) ** 2).mean() / (values**2).mean() < 0.0065


@pytest.mark.full
def test_quantising_loses_what_the_rate_allows() -> None:
    # given a weight with columns of different size, at a rate of 3 bits
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(2)) * (0.02 + 0.05 * torch.rand(128))
    parts = encode.quantise(weight, 3, "mcg")
    back = decode.dequantise(parts["trellis"], parts["suh"], parts["svh"], "mcg")
    # then the relative error is that of the format at 3 bits: 1.74 %
    assert ((back - weight) ** 2).sum() / (weight**2).sum() < 0.02
