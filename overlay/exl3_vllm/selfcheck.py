"""What an image must pass to come into being: locked versions are the ones imported, and the plugin decodes right.

`python -m exl3_vllm.selfcheck --requirements FILE` runs at the end of the image's build; no GPU, no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import re
import sys
from pathlib import Path

# sha256 of the fp16 weights that `golden_trellis` decodes to, per codebook and bits per weight.
GOLDEN: dict[tuple[str, float], str] = {
    ("3inst", 3): "1efbb1078312d23947d47c47c7354338acaace81092328cab3b9131a01d4a235",
    ("mcg", 3): "a4df93e76207ea12bd854c2190e7675a08ec76812c032246e9bb6b3811f41d81",
    ("mcg", 2.5): "ab9779eb113b70ee9bee8e5c22b2eb8e853fef8959913699e0da02467b2341e4",
    ("mcg", 4): "fcb636b4723ebf7027159fc44e5d9a4350f0aa079ccd8abf9346941b3040faa3",
    ("mul1", 4): "7d7c01b622427547d7c83c0bc230fb078c00edcc71c556447379c6fa522b54c7",
}

ROWS, COLUMNS = 2, 3  # tiles; odd, so that a swap of the two shows


def golden_trellis(bits: float) -> list[int]:
    """A trellis of 2 x 3 tiles as unsigned 16-bit words: any bits are a valid trellis, these come from SHA-256."""
    words = ROWS * COLUMNS * int(16 * bits)
    stream = b"".join(hashlib.sha256(f"exl3 {bits} {block}".encode()).digest() for block in range(words // 16))
    return [int.from_bytes(stream[2 * i : 2 * i + 2], "little") for i in range(words)]


def decoded_digest(codebook: str, bits: float) -> str:
    """sha256 of the little-endian fp16 weights [32, 48] that the golden trellis decodes to."""
    import torch

    from exl3_vllm.decode import inner_weight

    words = torch.tensor(golden_trellis(bits), dtype=torch.int32).to(torch.int16)
    weights = inner_weight(words.reshape(ROWS, COLUMNS, -1), codebook)
    return hashlib.sha256(weights.contiguous().numpy().tobytes()).hexdigest()


def wrong_decodes() -> list[str]:
    """A sentence for each codebook and rate that decodes to other weights than it should."""
    return [
        f"the {codebook} codebook at {bits} bits decodes to other weights than it should"
        for (codebook, bits), digest in GOLDEN.items()
        if decoded_digest(codebook, bits) != digest
    ]


def locked_versions(requirements: str) -> dict[str, str]:
    """Name -> version of the `name==version` lines."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", requirements, re.MULTILINE))


def wrong_versions(requirements: str) -> list[str]:
    """A sentence for each `name==version` line whose distribution is absent or of another version."""
    told = []
    for name, version in locked_versions(requirements).items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "absent"
        if found != version:
            told.append(f"{name} {version} is locked and {found} is installed")
    return told


def wrong_torch(requirements: str, version: str, cuda: str | None) -> list[str]:
    """Sentences where torch, by its own `__version__` and `version.cuda`, is another build than the locked one.

    The wheel of 2.14.0 of a package index calls itself "2.14.0+cu130": what stands behind the plus is compared only
    where the lock has it too, and the CUDA always, with the runtime that is locked beside it. Nothing is said where
    torch is not locked, because the base brought it.
    """
    locked = locked_versions(requirements)
    if "torch" not in locked:
        return []
    told = []
    if (version if "+" in locked["torch"] else version.partition("+")[0]) != locked["torch"]:
        told.append(f"torch {locked['torch']} is locked and torch calls itself {version}")
    runtime = locked.get("nvidia-cuda-runtime")
    if cuda != (".".join(runtime.split(".")[:2]) if runtime else None):
        told.append(f"torch was built for CUDA {cuda or 'none'} and the locked CUDA runtime is {runtime or 'none'}")
    return told


def wrong_imports(requirements: str) -> list[str]:
    """What is imported instead of what is locked: torch by its own word, and the quantisation as vLLM sees it."""
    import torch
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    told = wrong_torch(requirements, torch.__version__, torch.version.cuda)
    load_general_plugins()
    config = get_quantization_config("exl3")
    if not config.__module__.startswith("exl3_vllm."):
        told.append(f"vLLM's quantisation exl3 comes from {config.__module__}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requirements", type=Path, required=True, help="the locked name==version lines")
    requirements = parser.parse_args().requirements.read_text(encoding="utf-8")
    from exl3_vllm import selfcheck_kernels, selfcheck_tiers

    told = [*wrong_versions(requirements), *wrong_decodes(), *selfcheck_tiers.problems()]
    told += selfcheck_kernels.problems()
    told = told or wrong_imports(requirements)
    for sentence in told:
        print(f"selfcheck: {sentence}", file=sys.stderr)
    if not told:
        count = len(locked_versions(requirements))
        print(f"selfcheck: {count} locked versions, {len(GOLDEN)} decodes, the tiers and the plugin are right")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
