"""`kit bench kernels`: the bench of the overlay on a GPU, in a recipe's image on a node or here with a library file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import gpus, image_program, paths, synthetic
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.nodes import Node
    from exl3kit.progress import Progress

MODULE = "exl3_vllm.bench"
TABLE = "table.json"  # this GPU's tile and crossover choices, as `exl3_vllm.plans.load_table` reads them
SECONDS = 1800  # 40 s on an H200; a GB10 has an eighth of its tensor rate and a seventeenth of its bandwidth
_INSIDE = "/tmp/bench"
_NO_GPU = 3  # the bench's own exit code


def words(out: str, only: str | None) -> list[str]:
    """Arguments of the overlay's bench."""
    chosen = ["--only", only] if only else []
    return ["--out", out, "--write-table", f"{out}/{TABLE}", *chosen]


def on_node(node: Node, image: str, only: str | None, out: Path, progress: Progress) -> dict[str, Any]:
    """Run it in ``image`` on ``node``; its files land in ``out``. The report of `_told`.

    Raises KitError (preflight) when the node has no GPU, or its engine cannot give it to a container.
    """
    try:
        there = gpus.ask(node)
    except KitError as error:
        error.code = ExitCode.PREFLIGHT
        raise
    name = f"kernels on {node.name}, {there[0].name} ({there[0].capability})"
    with progress.stage(name):
        argv = ["python", "-m", MODULE, *words(_INSIDE, only)]
        ended = image_program.run(node, image, argv, gpus=True, collect=_INSIDE, tell=progress.tell, seconds=SECONDS)
    out.mkdir(parents=True, exist_ok=True)
    for path, content in ended.files.items():
        if path == Path(path).name:  # what the bench writes lies flat
            (out / path).write_bytes(content)
    return _told(ended.code, ended.stderr, out, f"node {node.name}")


def here(library: Path, only: str | None, out: Path, progress: Progress) -> dict[str, Any]:
    """Run it on this machine's GPU with a library file, by the Python here that has torch. As `on_node`."""
    python = synthetic.torch_python()
    if python is None:
        raise KitError(
            "no Python with torch on this machine",
            next_step=f"name one in {synthetic.PYTHON_VARIABLE}, or measure in an image: kit bench kernels RECIPE",
            code=ExitCode.PREFLIGHT,
        )
    out.mkdir(parents=True, exist_ok=True)
    argv = [str(python), "-m", MODULE, "--library", str(library.resolve()), *words(str(out.resolve()), only)]
    environment = {**os.environ, "PYTHONPATH": str(paths.OVERLAY), "PYTHONDONTWRITEBYTECODE": "1"}
    stderr: list[str] = []
    with progress.stage("kernels on this machine"):
        running = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
        with running:
            assert running.stderr is not None
            for line in running.stderr:
                stderr.append(line)
                progress.tell(line.rstrip())
    return _told(running.returncode, "".join(stderr), out, "this machine")


def _told(code: int, stderr: str, out: Path, where: str) -> dict[str, Any]:
    """`about`, `results`, `table` (this GPU's choices), `text` (the verdicts), `files`, and `valid`.

    Raises KitError: preflight without a GPU, benchmark when it did not come to an end.
    """
    said = [line for line in stderr.strip().splitlines() if line]
    if code == _NO_GPU:
        raise KitError(
            "no GPU that torch can use",
            where=where,
            why=said[-1].removeprefix("bench: ") if said else None,
            next_step="name a node that has one: kit bench kernels RECIPE --nodes NAME",
            code=ExitCode.PREFLIGHT,
        )
    if code not in (0, ExitCode.BENCHMARK) or not (out / "bench.json").is_file():
        raise KitError(
            "the bench of the kernels did not come to an end",
            where=where,
            why=said[-1] if said else f"exit code {code}",
            code=ExitCode.BENCHMARK,
        )
    written: Mapping[str, Any] = json.loads((out / "bench.json").read_text())
    table = out / TABLE
    return {
        **written,
        "table": json.loads(table.read_text()) if table.is_file() else None,
        "text": (out / "bench.txt").read_text(),
        "files": sorted(str(path) for path in out.iterdir()),
        "valid": code == 0,
    }
