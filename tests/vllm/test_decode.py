"""The reference decoder against golden hashes, and against what exllamav3 itself decoded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from exl3_vllm import decode
from exl3_vllm.format import CODEBOOKS, HALF_BITS, Checkpoint, group_matrices, read_header
from safetensors.torch import load_file

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
CHECKPOINTS = ("llama_3.0bpw_mcg", "llama_4.0bpw_mul1", "qwen3moe_4.0bpw_mcg")
SINGLES = ("single_3inst", "single_mcg", "single_mul1")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def seeded_trellis(half_bits: int) -> torch.Tensor:
    """int16 [8, 16, 8 * half_bits] from SHAKE-256: 128 tiles, the same on every machine."""
    data = hashlib.shake_256(f"golden {half_bits}".encode()).digest(2 * 8 * 16 * 8 * half_bits)
    return torch.frombuffer(bytearray(data), dtype=torch.int16).reshape(8, 16, 8 * half_bits)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_state_has_its_golden_value(codebook: str) -> None:
    assert digest(decode.codebook_values(codebook)) == GOLDEN["codebooks"][codebook]


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("half_bits", HALF_BITS)
def test_seeded_tiles_decode_to_their_golden_weights(half_bits: int, codebook: str) -> None:
    weight = decode.inner_weight(seeded_trellis(half_bits), codebook)
    assert digest(weight) == GOLDEN["tiles"][f"{half_bits / 2:g}"][codebook]


def test_a_matrix_larger_than_one_chunk_decodes_like_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    trellis = seeded_trellis(6)
    whole = decode.inner_weight(trellis, "mcg")
    monkeypatch.setattr(decode, "CHUNK_WEIGHTS", 3 * 16 * 256)
    assert torch.equal(decode.inner_weight(trellis, "mcg"), whole)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_forward_agrees_with_the_dequantised_matrix(codebook: str) -> None:
    # given a matrix with uneven scales, a bias, and some input rows
    torch.manual_seed(7)
    trellis = seeded_trellis(5)
    suh, svh = (torch.randn(128).half() for _ in range(2))
    svh = torch.cat([svh, svh * 0.5])
    x, bias = torch.randn(5, 128), torch.randn(256)
    # when it is applied in the rotated basis and in the original one
    rotated = decode.forward(x, trellis, suh, svh, codebook, bias)
    dense = x @ decode.dequantise(trellis, suh, svh, codebook) + bias
    # then both agree to fp32 rounding
    assert torch.linalg.norm(rotated - dense) / torch.linalg.norm(dense) < 1e-5


def test_legacy_signs_are_the_scales_they_stand_for() -> None:
    # given signs, packed as bit i of word j = -1 at 16 j + i
    signs = torch.tensor([1, -1, -1, 1] * 8, dtype=torch.float16)
    bits = (signs < 0).to(torch.int32).view(2, 16)
    packed = (bits << torch.arange(16, dtype=torch.int32)).sum(1).to(torch.int16)
    # when / then
    assert torch.equal(decode.unpack_signs(packed), signs)


def test_upstream_packs_the_same_signs(upstream: Path) -> None:
    import numpy

    reference = numpy.load(upstream / "singles_refs.npz")
    packed = torch.from_numpy(reference["pack_signs|out"])
    assert torch.equal(decode.unpack_signs(packed), torch.from_numpy(reference["pack_signs|in"]))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_upstream_checkpoints_decode_bit_for_bit(name: str, upstream: Path) -> None:
    # given a checkpoint written by exllamav3's converter
    checkpoint = Checkpoint.open(upstream / name)
    tensors = load_file(upstream / name / "model.safetensors")
    # when / then every matrix decodes to what exllamav3's reconstruct gave
    golden = GOLDEN["upstream"][name]
    assert set(checkpoint.matrices) == set(golden)
    for module, matrix in checkpoint.matrices.items():
        assert digest(decode.inner_weight(tensors[f"{module}.trellis"], matrix.codebook)) == golden[module], module


@pytest.mark.parametrize("name", SINGLES)
def test_upstream_single_matrices_decode_bit_for_bit(name: str, upstream: Path) -> None:
    file = upstream / f"{name}.safetensors"
    matrices, tensors = group_matrices(read_header(file)), load_file(file)
    references = json.loads((upstream / "singles_refs.json").read_text())["inner"]
    assert matrices
    for module, matrix in matrices.items():
        parts = {kind: tensors[f"{module}.{kind}"] for kind in ("trellis", "suh", "svh")}
        # bits, rate and codebook come from the tensors alone
        assert matrix.codebook == name.removeprefix("single_")
        assert matrix.bits == references[module]["K"]
        assert digest(decode.inner_weight(parts["trellis"], matrix.codebook)) == GOLDEN["upstream"]["singles"][module]
        # and the original basis agrees with upstream's fp16 arithmetic
        weight = decode.dequantise(parts["trellis"], parts["suh"], parts["svh"], matrix.codebook)
        sampled = weight.flatten()[references[module]["sample_idx"]]
        torch.testing.assert_close(sampled, torch.tensor(references[module]["weight_sample"]), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", SINGLES)
def test_forward_is_within_fp16_error_of_upstreams_kernels(name: str, upstream: Path) -> None:
    import numpy

    file = upstream / f"{name}.safetensors"
    matrices, tensors = group_matrices(read_header(file)), load_file(file)
    references = json.loads((upstream / "singles_refs.json").read_text())["forward"]
    kept = numpy.load(upstream / "singles_refs.npz")
    checked = 0
    for key, reference in references.items():
        module = key.split("|")[0]
        if module not in matrices:
            continue
        rows = numpy.random.RandomState(70000 + reference["m"]).standard_normal((reference["m"], reference["k"]))
        x = torch.from_numpy(rows.astype(numpy.float16))[reference["rows"]]
        parts = [tensors[f"{module}.{kind}"] for kind in ("trellis", "suh", "svh")]
        ours = decode.forward(x, *parts, matrices[module].codebook)
        theirs = torch.from_numpy(kept[f"y|{key}"]).float()
        # upstream's own paths differ from fp64 by 4e-4 to 1.1e-3, depending on the kernel
        assert torch.linalg.norm(ours - theirs) / torch.linalg.norm(theirs) < 1.5e-3, key
        checked += 1
    assert checked >= 10
