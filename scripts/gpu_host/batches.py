"""Which jobs make up a batch. A batch is waves of jobs that run side by side; the names are what `run.sh` takes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from run import Job, python

Wave = list[Job]
TIERS = ("legacy", "sorted", "batched", "kernel", "grouped")
FIXTURES = ("llama_3.0bpw_mcg", "llama_4.0bpw_mul1", "qwen3moe_4.0bpw_mcg")
EXACT = ("--dtype", "float32", "--backend", "TRITON_ATTN")


def made(work: Path, *names: str) -> Job:
    """One job that writes checkpoints; those that are there already cost nothing."""
    words = [word for name in names for word in (name, str(work / "models" / name))]
    return Job(f"make-{names[0]}", python("models.py", *words))


def self_check(work: Path, pack: Path) -> Iterator[Wave]:
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(pack / "tests/gpu"), "-k", "vllm"]
    yield [
        Job("self-check", [sys.executable, "-m", "exl3_vllm.selfcheck_gpu"]),
        Job("tests-vllm", tests),
        made(work, "tiny-dense", "tiny-moe", "tiny-moe-own"),
    ]


def accuracy(work: Path, pack: Path) -> Iterator[Wave]:
    yield [made(work, "tiny-dense", "tiny-moe", "tiny-moe-own")]
    jobs = [_accuracy(work, name, "reference", "--reference") for name in ("tiny-dense", "tiny-moe", "tiny-moe-own")]
    jobs += [_accuracy(work, name, "eager", *EXACT, "--eager") for name in ("tiny-dense", "tiny-moe-own")]
    jobs += [_accuracy(work, name, "graphs", *EXACT) for name in ("tiny-dense", "tiny-moe", "tiny-moe-own")]
    jobs += [
        _accuracy(work, name, "decode-only", *EXACT, "--mode", "FULL_DECODE_ONLY")
        for name in ("tiny-dense", "tiny-moe")
    ]
    jobs += [_accuracy(work, name, "bf16", "--dtype", "bfloat16") for name in ("tiny-dense", "tiny-moe")]
    for tier in TIERS:
        jobs.append(_accuracy(work, "tiny-moe", f"eager-{tier}", *EXACT, "--eager", EXL3_TIER=tier))
    off = {"VLLM_EXL3_PREFILL_RECONSTRUCT_M": "0"}
    jobs.append(_accuracy(work, "tiny-dense", "eager-off", *EXACT, "--eager", **off))
    yield jobs
    names = ("tiny-dense", "tiny-moe", "tiny-moe-own")
    compare = [Job(f"compare.{name}", python("accuracy.py", "--compare", name)) for name in names]
    served = [Job(f"fixture.{name}", python("fixtures.py", name)) for name in FIXTURES]
    served += [Job(f"fixture.{name}.eager", python("fixtures.py", name, "--eager")) for name in FIXTURES]
    yield [*compare, *served]


def _accuracy(work: Path, name: str, kind: str, *words: str, **environment: str) -> Job:
    label = f"{name}.{kind}"
    return Job(label, python("accuracy.py", str(work / "models" / name), label, *words), 200, environment)


def kernels(work: Path, pack: Path) -> Iterator[Wave]:
    """Tests and bench of the kernels alone; then K9's build, and memory and race checks on small shapes."""
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(pack / "tests/gpu"), "-k"]
    yield [Job("tests-kernels", [*tests, "not vllm"], 300)]
    bench = [sys.executable, "-m", "exl3_vllm.bench", "--library"]
    results, library, slow = work / "results", pack / "lib/exl3_kernels.abi3.so", pack / "lib/slow_tensor.abi3.so"
    table = ["--write-table", str(results / "table.json")]
    yield [Job("bench-kernels", [*bench, str(library), "--out", str(results / "kernels"), *table], 300)]
    if slow.is_file():
        yield [Job("bench-k9", [*bench, str(slow), "--out", str(results / "k9"), "--slow-tensor"], 200)]
    if shutil.which("compute-sanitizer"):
        own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor its own allocation, so that its end is seen
        for tool in ("memcheck", "racecheck"):
            words = [
                "compute-sanitizer",
                "--kernel-name",
                "kernel_substring=exl3",
                "--error-exitcode",
                "9",
                "--tool",
                tool,
            ]
            yield [Job(tool, [*words, *tests, "small or scatter or grouped or padded"], 300, own)]


def _arms(work: Path, name: str, label: str, *words: str) -> Job:
    return Job(label, python("arms.py", str(work / "models" / name), label, *words), 420, timed=True)


def end_to_end(work: Path, pack: Path) -> Iterator[Wave]:
    """TP1: each model beside its unquantised control; in one wave what fits the GPU together."""
    every = ",".join(TIERS)
    yield [
        made(work, "qwen3-30b-k4", "plain:qwen3-30b-k4"),
        made(work, "dense-40", "plain:dense-40"),
        made(work, "qwen3-30b-k3"),
        made(work, "glm-shape", "plain:glm-shape"),
    ]
    yield [
        _arms(work, "qwen3-30b-k4", "moe-k4", "--arms", every, "--profile"),
        _arms(work, "plain:qwen3-30b-k4", "moe-bf16", "--dummy", "--profile"),
        _arms(work, "dense-40", "dense", "--arms", "off,on", "--profile"),
        _arms(work, "plain:dense-40", "dense-bf16", "--dummy", "--profile"),
    ]
    yield [
        _arms(work, "qwen3-30b-k4", "moe-k4-eager", "--eager", "--arms", "grouped"),
        _arms(work, "qwen3-30b-k3", "moe-k3-mul1", "--arms", every),
        _arms(work, "dense-40", "dense-eager", "--eager", "--arms", "off,on"),
        _arms(work, "glm-shape", "glm-k4", "--arms", "legacy,grouped"),
    ]


def endurance(work: Path, pack: Path) -> Iterator[Wave]:
    """Not timed: these share the GPU. 10,000 mixed steps, 64 clients for three minutes."""
    yield [made(work, "tiny-dense", "tiny-moe")]
    tiny = work / "models"
    yield [
        Job("soak-moe", python("soak.py", str(tiny / "tiny-moe"), "soak-moe"), 500),
        Job("soak-dense", python("soak.py", str(tiny / "tiny-dense"), "soak-dense"), 500),
        Job(
            "soak-speculative",
            python("soak.py", str(tiny / "tiny-moe"), "soak-speculative", "--speculative", "--steps", "3000"),
            400,
        ),
        Job("serve-moe", python("serving.py", str(tiny / "tiny-moe"), "serve-moe"), 420),
    ]


BATCHES: dict[str, Callable[[Path, Path], Iterator[Wave]]] = {
    "self-check": self_check,
    "accuracy": accuracy,
    "kernels": kernels,
    "e2e-tp1": end_to_end,
    "endurance": endurance,
}
