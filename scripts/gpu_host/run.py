"""Runs batches of jobs on a GPU host from the packed folder: `bash run.sh BATCH...`; results go to OUT.

Jobs of a wave start together, each under its own time limit; those that time something take turns on the GPU. A job
that fails stops no other. Standard library only: it prepares what the jobs import.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACK = HERE.parent
WORK = Path(os.environ.get("GPU_WORK", "/tmp/exl3-gpu"))
OUT = Path(os.environ.get("OUT", PACK / "out")).resolve()
RESULTS = WORK / "results"
STARTED = time.monotonic()

ENVIRONMENT = {
    # vLLM is carried without FlashInfer, and nothing here may use the NVLink multicast of a shared machine.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "EXL3_STAMP": "gpu-host",
}


@dataclass
class Job:
    """One process. `timed`: it waits for the others of its wave, and for its turn."""

    label: str
    argv: list[str]
    limit: int = 240
    environment: dict[str, str] = field(default_factory=dict)
    timed: bool = False


def python(script: str, *words: str) -> list[str]:
    return [sys.executable, str(HERE / script), *words]


def prepare() -> dict[str, str]:
    """Unpack vLLM once per host, and say what every job gets in its environment."""
    site = WORK / "site"
    for folder in (WORK / "logs", RESULTS, OUT):
        folder.mkdir(parents=True, exist_ok=True)
    bundle = PACK / "vllm/bundle.tar.xz"
    if bundle.exists() and not (site / ".complete").exists():
        site.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-C", str(site), "-I", "xz -T0", "-xf", str(bundle)], check=True)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "16", str(site)], stdout=subprocess.DEVNULL)
        (site / ".complete").touch()
        print(f"{clock()} vLLM unpacked", flush=True)
    library = PACK / "overlay/exl3_vllm/exl3_kernels.abi3.so"
    if not library.exists():
        shutil.copyfile(PACK / "lib/exl3_kernels.abi3.so", library)
    path = [str(site), str(PACK / "overlay"), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "EXL3_FIXTURES": str(PACK / "tests/fixtures"),
        "EXL3_LIBRARY": str(library),
        "GPU_WORK": str(WORK),
        "OUT": str(RESULTS),
    }


KEEPING = threading.Lock()


def keep() -> None:
    """Bring results and logs out, after each job: a host may be taken away."""
    with KEEPING:
        for name in ("results", "logs"):
            made = OUT / f"{name}.tar.gz.new"
            subprocess.run(["tar", "-C", str(WORK), "-czf", str(made), name], check=False)
            made.replace(OUT / f"{name}.tar.gz")


def clock() -> str:
    return f"[{time.monotonic() - STARTED:5.1f} s]"


def wave(jobs: list[Job], base: dict[str, str]) -> None:
    """Start all, wait for all."""
    barrier = WORK / "barrier"
    shutil.rmtree(barrier, ignore_errors=True)
    barrier.mkdir(parents=True)
    waiting = sum(job.timed for job in jobs)
    threads = [threading.Thread(target=run, args=(job, base, barrier, waiting)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(job: Job, base: dict[str, str], barrier: Path, waiting: int) -> None:
    log = WORK / "logs" / f"{job.label}.log"
    environment = {**base, **job.environment, "GPU_BARRIER": str(waiting)}
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            job.argv, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code: int | str = process.wait(job.limit)
        except subprocess.TimeoutExpired:
            code = "past its limit"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # also what it left running
        process.wait()
    if job.timed:
        (barrier / job.label).touch()
    keep()
    lines = log.read_text(errors="replace").splitlines()
    told = [line[:700] for line in lines if line.startswith("RESULT")]
    if code != 0:
        told += [line[:300] for line in lines if "Error" in line][-5:] + [line[:240] for line in lines[-12:]]
    spent = time.monotonic() - started
    print("\n".join([f"{clock()} {job.label}: {code}, {spent:.0f} s", *told]), flush=True)


def main() -> int:
    import batches  # beside this file, and it imports from here

    base = prepare()
    for name in sys.argv[1:]:
        for number, jobs in enumerate(batches.BATCHES[name](WORK, PACK)):
            print(f"{clock()} {name}, wave {number + 1}: {', '.join(job.label for job in jobs)}", flush=True)
            wave(jobs, base)
    print(f"{clock()} done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
