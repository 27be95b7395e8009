"""Which jobs make up a batch. A batch is waves of jobs that run side by side; the names are what `run.sh` takes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from run import Job, python

Wave = list[Job]
TIERS = ("legacy", "sorted", "batched", "kernel", "grouped")
FIXTURES = ("llama_3.0bpw_mcg", "llama_4.0bpw_mul1", "qwen3moe_4.0bpw_mcg")
AUTO = {"tiny-dense": "auto", "tiny-moe": "grouped"}
EXACT = ("--dtype", "float32", "--backend", "TRITON_ATTN")


def models(work: Path) -> Path:
    """In memory where there is enough of it: a host's disk may be smaller than its checkpoints."""
    memory = Path("/dev/shm")
    return memory / "exl3-models" if memory.is_dir() and shutil.disk_usage(memory).total > 100e9 else work / "models"


def place(work: Path, name: str) -> Path:
    return models(work) / name.replace(":", "-")


def made(work: Path, *names: str) -> Job:
    """One job that writes checkpoints; those that are there already cost nothing."""
    words = [word for name in names for word in (name, str(place(work, name)))]
    return Job(f"make-{names[0]}", python("models.py", *words))


def known() -> Job:
    """vLLM asks each architecture what it can do, in a process of its own that imports vLLM: once is enough."""
    words = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"]
    return Job("architectures", [sys.executable, "-m", "exl3_vllm.modelinfo", *words])


def _tests(pack: Path, chosen: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(pack / "tests/gpu"), "-k", chosen]


def quick(work: Path, pack: Path) -> Iterator[Wave]:
    """What needs no engine: the self-check and the traps on operators."""
    check = [sys.executable, "-m", "exl3_vllm.selfcheck_gpu"]
    yield [Job("self-check", check, 60), Job("tests-quick", _tests(pack, "vllm and not engine"), 100)]


def self_check(work: Path, pack: Path) -> Iterator[Wave]:
    yield [made(work, "tiny-dense", "tiny-moe", "tiny-moe-own"), known()]
    yield [*next(quick(work, pack)), Job("tests-engine", _tests(pack, "vllm and engine"))]


def accuracy(work: Path, pack: Path) -> Iterator[Wave]:
    names = ("tiny-dense", "tiny-moe", "tiny-moe-own")
    yield [made(work, *names), known()]
    jobs = [_accuracy(work, name, "reference", "--reference") for name in names]
    jobs += [_accuracy(work, name, "eager", *EXACT, "--eager") for name in ("tiny-dense", "tiny-moe-own")]
    jobs += [_accuracy(work, name, "graphs", *EXACT) for name in names]
    jobs.append(_accuracy(work, "tiny-dense", "uncompiled", *EXACT, "--uncompiled"))
    jobs += [
        _accuracy(work, name, "decode-only", *EXACT, "--mode", "FULL_DECODE_ONLY")
        for name in ("tiny-dense", "tiny-moe")
    ]
    jobs += [_accuracy(work, name, "bf16", "--dtype", "bfloat16") for name in ("tiny-dense", "tiny-moe")]
    for tier in TIERS:
        jobs.append(_accuracy(work, "tiny-moe", f"eager-{tier}", *EXACT, "--eager", EXL3_TIER=tier))
    off = {"VLLM_EXL3_PREFILL_RECONSTRUCT_M": "0"}
    jobs.append(_accuracy(work, "tiny-dense", "eager-off", *EXACT, "--eager", **off))
    jobs += [Job(f"fixture.{name}", python("fixtures.py", name)) for name in FIXTURES]
    jobs += [Job(f"fixture.{name}.eager", python("fixtures.py", name, "--eager")) for name in FIXTURES]
    yield jobs
    bases = ("reference", "eager")
    yield [Job(f"compare.{n}.{b}", python("accuracy.py", "--compare", n, "--base", b)) for n in names for b in bases]


def _accuracy(work: Path, name: str, kind: str, *words: str, **environment: str) -> Job:
    label = f"{name}.{kind}"
    return Job(label, python("accuracy.py", str(place(work, name)), label, *words), 200, environment)


def kernels(work: Path, pack: Path) -> Iterator[Wave]:
    """Tests and bench of the kernels alone; then K9's build, and memory and race checks on small shapes."""
    check = Job("kernel-check", [sys.executable, "-m", "exl3_vllm.kernelcheck"], 60)
    yield [check, Job("tests-kernels", _tests(pack, "not vllm"), 300)]
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
            yield [Job(tool, [*words, *_tests(pack, "small_ or scatter or grouped or padded")], 300, own)]


def _arms(work: Path, name: str, label: str, *words: str, group: str = "bench", **place_: Any) -> Job:
    return Job(label, python("arms.py", str(place(work, name)), label, *words), 420, timed=group, **place_)


def end_to_end(work: Path, pack: Path) -> Iterator[Wave]:
    """TP1: each model beside its unquantised control; in one wave what fits the GPU together."""
    every = ",".join(TIERS)
    big = ("qwen3-30b-k4", "dense-40", "qwen3-30b-k3", "glm-shape", "qwen3-30b-k4-layer")
    yield [known(), *(made(work, name, f"plain:{name}") for name in big)]
    yield [
        _arms(work, "qwen3-30b-k4", "moe-k4", "--arms", every, "--profile", "grouped"),
        _arms(work, "plain:qwen3-30b-k4", "moe-bf16", "--dummy", "--profile", "plain"),
        _arms(work, "dense-40", "dense", "--arms", "off,on", "--profile", "off,on"),
        _arms(work, "plain:dense-40", "dense-bf16", "--dummy", "--profile", "plain"),
    ]
    yield [
        _arms(work, "qwen3-30b-k4", "moe-k4-eager", "--eager", "--arms", "grouped"),
        _arms(work, "dense-40", "dense-eager", "--eager", "--arms", "on"),
        _arms(work, "qwen3-30b-k3", "moe-k3-mul1", "--arms", "legacy,grouped"),
        _arms(work, "glm-shape", "glm-k4", "--arms", "legacy,grouped"),
        _arms(work, "qwen3-30b-k4-layer", "moe-k4-layer", "--arms", "grouped"),
    ]


def end_to_end_two(work: Path, pack: Path) -> Iterator[Wave]:
    """TP2 on two GPUs of one host: dense and experts, graphs on; then as two machines would, one process a GPU."""
    names = ("tiny-dense", "tiny-moe")
    yield [made(work, *names), known()]
    jobs = [_accuracy(work, name, "tp2", *EXACT, "--tp", "2", EXL3_TIER=AUTO[name]) for name in names]
    jobs += [_accuracy(work, name, "tp2-eager", *EXACT, "--tp", "2", "--eager") for name in names]
    jobs += [_accuracy(work, name, "graphs", *EXACT) for name in names]
    jobs += [_accuracy(work, name, "eager", *EXACT, "--eager") for name in names]
    jobs += [Job("two-hosts", python("two_hosts.py", str(place(work, "tiny-moe")), "two-hosts"), 240)]
    yield jobs
    yield [Job(f"compare.{name}", python("accuracy.py", "--compare", name, "--base", "eager")) for name in names]


def endurance(work: Path, pack: Path) -> Iterator[Wave]:
    """Not timed: these share the GPU. 10,000 mixed steps, 64 clients for three minutes."""
    yield [made(work, "tiny-dense", "tiny-moe"), known()]
    tiny = models(work)
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


def campaign(work: Path, pack: Path) -> Iterator[Wave]:
    """What six minutes on two GPUs hold: the timed engines have GPU 0, once TP2 is done; GPU 1 has the rest."""
    tiny = ("tiny-dense", "tiny-moe", "tiny-moe-own")
    every = ",".join(TIERS)
    first = [
        made(work, *tiny),
        made(work, "plain:qwen3-30b-k4", "qwen3-30b-k4"),
        made(work, "plain:dense-40", "dense-40"),
        _arms(work, "qwen3-30b-k4", "moe-k4", "--arms", every, "--profile", "grouped", gpu=0),
        _arms(work, "dense-40", "dense", "--arms", "off,on", "--profile", "off,on", gpu=0),
        _arms(work, "plain:qwen3-30b-k4", "moe-bf16", "--dummy", "--profile", "plain", gpu=0),
        _arms(work, "plain:dense-40", "dense-bf16", "--dummy", "--profile", "plain", gpu=0),
    ]
    for name, tier in (("tiny-moe", "grouped"), ("tiny-dense", "auto")):
        job = _accuracy(work, name, "tp2", *EXACT, "--tp", "2", EXL3_TIER=tier)
        first.append(replace(job, quiet="bench", limit=130, nice=2))
    two = Job(
        "two-hosts", python("two_hosts.py", str(place(work, "tiny-moe")), "two-hosts"), 130, quiet="bench", nice=2
    )
    serve = ["serving.py", str(place(work, "tiny-moe")), "serve-moe", "--seconds", "185"]
    soak = python("soak.py", str(place(work, "tiny-moe")), "soak-moe", "--seconds", "200")
    first += [
        two,
        Job("serve-moe", python(*serve), 320, quiet="second", gpu=1, nice=3),
        Job("soak-moe", soak, 300, quiet="second", gpu=1, nice=5),
    ]
    yield first + _later(work, pack, tiny)


def _later(work: Path, pack: Path, tiny: tuple[str, ...]) -> Wave:
    """On GPU 1, as the cores get free."""
    jobs = [_accuracy(work, name, "graphs", *EXACT) for name in tiny]
    jobs += [_accuracy(work, name, "eager", *EXACT, "--eager") for name in tiny]
    jobs += [_accuracy(work, name, "reference", "--reference") for name in tiny]
    jobs.append(_accuracy(work, "tiny-moe", "decode-only", *EXACT, "--mode", "FULL_DECODE_ONLY"))
    jobs += [_accuracy(work, name, "bf16", "--dtype", "bfloat16") for name in ("tiny-dense", "tiny-moe")]
    jobs = [replace(job, gpu=1, nice=8, after=("tiny-moe.tp2", "tiny-dense.tp2")) for job in jobs]
    ends = tuple(job.label for job in jobs)
    jobs += [replace(job, gpu=1, nice=8, after=ends[:2]) for job in next(quick(work, pack))]
    words = ["--speculative", "--steps", "3000", "--seconds", "100"]
    soak = python("soak.py", str(place(work, "tiny-moe")), "soak-speculative", *words)
    jobs.append(Job("soak-speculative", soak, 200, gpu=1, nice=10, after=ends[:1]))
    own: dict[str, Any] = {"group": "second", "gpu": 1, "nice": 9, "after": ("make-qwen3-30b-k3",)}
    jobs += [
        made(work, "qwen3-30b-k3"),
        _arms(work, "qwen3-30b-k4", "moe-k4-eager", "--eager", "--arms", "grouped", **own),
        _arms(work, "dense-40", "dense-eager", "--eager", "--arms", "on", **own),
        _arms(work, "qwen3-30b-k3", "moe-k3-mul1", "--arms", "legacy,grouped", **own),
    ]
    jobs[-4] = replace(jobs[-4], nice=9, after=("make-tiny-dense", "make-plain:qwen3-30b-k4", "make-plain:dense-40"))
    for base, names in (("reference", tiny), ("eager", tiny)):
        for name in names:
            compare = python("accuracy.py", "--compare", name, "--base", base)
            jobs.append(Job(f"compare.{name}.{base}", compare, 30, after=ends))
    return jobs


def rest(work: Path, pack: Path) -> Iterator[Wave]:
    """What `campaign` had no time for: two processes as two machines, engines against each other, the other models."""
    names = ("tiny-dense", "tiny-moe")
    two = python("two_hosts.py", str(place(work, "tiny-moe")), "two-hosts")
    jobs = [made(work, *names), Job("two-hosts", two, 150, quiet="bench")]
    compared = [_accuracy(work, name, "eager", *EXACT, "--eager") for name in names]
    compared += [_accuracy(work, name, "graphs", *EXACT) for name in names]
    compared = [replace(job, gpu=1, quiet="bench") for job in compared]
    for name in names:
        job = _accuracy(work, name, "tp2", *EXACT, "--tp", "2", EXL3_TIER=AUTO[name])
        compared.append(replace(job, quiet="bench"))
    ends = tuple(job.label for job in compared)
    jobs += compared
    jobs += [
        Job(f"compare.{n}", python("accuracy.py", "--compare", n, "--base", "eager"), 30, after=ends) for n in names
    ]
    for name in ("qwen3-30b-k4", "qwen3-30b-k4-layer", "qwen3-30b-k3", "glm-shape"):
        jobs.append(made(work, name))
        jobs.append(_arms(work, name, name, "--arms", "legacy,grouped", "--profile", "grouped", gpu=0))
    jobs.append(_arms(work, "qwen3-30b-k4", "moe-k4-eager", "--eager", "--arms", "grouped", gpu=0))
    yield jobs


BATCHES: dict[str, Callable[[Path, Path], Iterator[Wave]]] = {
    "quick": quick,
    "self-check": self_check,
    "accuracy": accuracy,
    "kernels": kernels,
    "e2e-tp1": end_to_end,
    "e2e-tp2": end_to_end_two,
    "endurance": endurance,
    "campaign": campaign,
    "rest": rest,
}
