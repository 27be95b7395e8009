"""Runs batches of jobs on a GPU host from the packed folder: `bash run.sh BATCH...`; results go to OUT. `A+B` runs two
batches side by side, wave by wave.

Jobs of a wave start together, each under its own time limit; those that time something take turns on the GPU. A job
that fails stops no other. Standard library only: it prepares what the jobs import.
"""

from __future__ import annotations

import contextlib
import itertools
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
    # A thread per core in each of many engines: they wait for each other. 9 ms for a tensor, 140 s for a compilation.
    "OMP_NUM_THREADS": "2",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
}


@dataclass
class Job:
    """One process.

    after: labels of its wave that end first. timed: the group of jobs that wait until all of them have started and then
    take turns; `quiet` names a group that waits until this job has ended. gpu: the only one it sees. nice: of nice(1).
    """

    label: str
    argv: list[str]
    limit: int = 240
    environment: dict[str, str] = field(default_factory=dict)
    timed: str = ""
    quiet: str = ""
    after: tuple[str, ...] = ()
    gpu: int | None = None
    nice: int = 0


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
    facts = Path.home() / ".cache/vllm/modelinfos"
    if (PACK / "modelinfos").is_dir() and not facts.exists():
        shutil.copytree(PACK / "modelinfos", facts)
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


def left() -> float:
    """Seconds until GPU_SECONDS are over, by which everything has ended and is kept."""
    return float(os.environ.get("GPU_SECONDS", "100000")) - (time.monotonic() - STARTED)


def clock() -> str:
    return f"[{time.monotonic() - STARTED:5.1f} s]"


def wave(jobs: list[Job], base: dict[str, str]) -> None:
    """Start all, each when those that it waits for have ended; wait for all."""
    shutil.rmtree(WORK / "barrier", ignore_errors=True)
    groups = {name for job in jobs for name in (job.timed, job.quiet) if name}
    for name in groups:
        (WORK / "barrier" / name).mkdir(parents=True)
    waiting = {name: sum(name in (job.timed, job.quiet) for job in jobs) for name in groups}
    ended = {job.label: threading.Event() for job in jobs}
    threads = [threading.Thread(target=run, args=(job, base, waiting, ended)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(10)
            keep()


def run(job: Job, base: dict[str, str], waiting: dict[str, int], ended: dict[str, threading.Event]) -> None:
    for label in job.after:
        ended[label].wait()
    try:
        if left() > 20:
            attempt(job, base, waiting)
        else:
            print(f"{clock()} {job.label}: not started, no time is left", flush=True)
    finally:
        for name in filter(None, (job.timed, job.quiet)):
            (WORK / "barrier" / name / job.label).touch()
        ended[job.label].set()


def attempt(job: Job, base: dict[str, str], waiting: dict[str, int]) -> None:
    log = WORK / "logs" / f"{job.label}.log"
    environment = {**base, **job.environment, "GPU_BARRIER": job.timed, "GPU_WAIT_FOR": str(waiting.get(job.timed, 0))}
    if job.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(job.gpu)
    started = time.monotonic()
    with log.open("wb") as file:
        argv = ["nice", "-n", str(job.nice), *job.argv]
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code: int | str = process.wait(min(job.limit, left()))
        except subprocess.TimeoutExpired:
            code = "past its limit"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # also what it left running
        process.wait()
    lines = log.read_text(errors="replace").splitlines()
    told = [line[:600] for line in lines if line.startswith("RESULT")]
    if code != 0:
        told += [line[:300] for line in lines if "Error" in line][-3:] + [line[:200] for line in lines[-4:]]
    spent = time.monotonic() - started
    print("\n".join([f"{clock()} {job.label}: {code}, {spent:.0f} s", *told]), flush=True)


def main() -> int:
    import batches  # beside this file, and it imports from here

    base = prepare()
    for words in sys.argv[1:]:
        made = [batches.BATCHES[name](WORK, PACK) for name in words.split("+")]
        for number, waves in enumerate(itertools.zip_longest(*made, fillvalue=[])):
            jobs = {job.label: job for jobs in waves for job in jobs}
            print(f"{clock()} {words}, wave {number + 1}: {', '.join(jobs)}", flush=True)
            wave(list(jobs.values()), base)
    facts = Path.home() / ".cache/vllm/modelinfos"
    if facts.is_dir():  # lay them into the packed folder, and the next host need not ask
        shutil.copytree(facts, RESULTS / "modelinfos", dirs_exist_ok=True)
    keep()
    print(f"{clock()} done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
