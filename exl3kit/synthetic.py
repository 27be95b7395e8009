"""Synthetic checkpoints: random trellises of a model's true shapes, made by the overlay's `synth` where torch is.

The kit's own environment has no torch. The image has, and so has the environment of the vLLM tests.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3kit import paths
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

    from exl3kit.progress import Progress

PYTHON_VARIABLE = "EXL3KIT_VLLM_PYTHON"
SYNTH = ("-m", "exl3_vllm.synth")
NAMED_LAYERS = 2  # of a named geometry: enough to see layers work together, and small
_INSIDE = "/tmp/synth"  # in the container: any user may write below /tmp

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama": {  # Llama-3.1-8B
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "qwen3": {  # Qwen3-8B
        **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    },
    "qwen3-moe": {  # Qwen3-30B-A3B
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
}  # fmt: skip


def geometry(like: str, layers: int | None) -> dict[str, Any]:
    """The configuration to make: a named geometry or the file of a model, with another number of layers if asked.

    Raises `KitError` (usage) when it is neither a name nor a JSON object.
    """
    if like in GEOMETRIES:
        return {**GEOMETRIES[like], "torch_dtype": "float16", "num_hidden_layers": layers or NAMED_LAYERS}
    path = Path(like) / "config.json" if Path(like).is_dir() else Path(like)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        names = ", ".join(GEOMETRIES)
        raise KitError(
            "no model to take the shapes of",
            where=like,
            why=str(error),
            next_step=f"name a config.json, or one of {names}",
        ) from error
    if not isinstance(config, dict):
        raise KitError("this is no model's config.json", where=like, why="it holds no JSON object")
    return {**config, "num_hidden_layers": layers} if layers else config


def make(config: Mapping[str, Any], target: Path, options: Sequence[str], progress: Progress) -> str:
    """Write a checkpoint into the new or empty folder `target`; gives the words of where it was made.

    options: those of `exl3_vllm.synth` (`--rates`, `--codebooks`, `--seed`, `--shared-suh`).

    Raises `KitError`: the folder is not empty (usage), what is asked for cannot be made (usage), torch is nowhere
    (preflight).
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise KitError("is there already", where=paths.shown(target), next_step="name a folder that is new or empty")
    python = torch_python()
    beside = target.absolute().with_name(f".{target.name}.{os.getpid()}")  # a run cut short leaves no half checkpoint
    try:
        with progress.stage("write the checkpoint") as stage:
            if python is not None:
                stage.say(str(python))
                _make_here(python, config, beside, options)
                where = "the environment of the vLLM tests"
            else:
                where = _make_in_image(config, beside, options)
            if target.exists():
                target.rmdir()
            beside.rename(target)
            stage.conclude(f"{sum(file.stat().st_size for file in target.iterdir()) / 1e6:.1f} MB")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return where


def torch_python() -> Path | None:
    """The Python of an environment with torch on this machine, or None."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return Path(named)
    made = sorted(paths.cache_dir("vllm-env").glob("*/complete"), key=lambda mark: mark.stat().st_mtime)
    return made[-1].parent / "bin" / "python" if made else None


def _make_here(python: Path, config: Mapping[str, Any], target: Path, options: Sequence[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(paths.OVERLAY), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="kit-synth-") as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps(config), encoding="utf-8")
        command = [str(python), *SYNTH, str(source), str(target), *options]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            raise KitError("cannot be run", where=str(python), why=str(error), code=ExitCode.PREFLIGHT) from error
    if done.returncode != 0:
        raise _refused(done.stderr)


def _refused(said: str) -> KitError:
    lines = said.strip().splitlines() or ["it said nothing"]
    words = lines[-1].partition("error: ")[2] or lines[-1]
    return KitError("this checkpoint cannot be made", why=words, next_step="kit models synth --help")


# ---- in the image ----------------------------------------------------------------------------------------------------


def _make_in_image(config: Mapping[str, Any], target: Path, options: Sequence[str]) -> str:
    from exl3kit import engine

    try:
        client, _ = engine.open_local()
    except KitError as error:
        raise _no_torch(error.what) from error
    image = _newest_image(client)
    if image is None:
        raise _no_torch("the engine holds no image of the kit")
    command = [*SYNTH, f"{_INSIDE}/config.json", f"{_INSIDE}/out", *options]
    container = client.containers.create(image, entrypoint=["python"], command=command, network_disabled=True)
    try:
        container.put_archive("/tmp", _folder_with(json.dumps(config).encode()))
        container.start()
        code = int(container.wait()["StatusCode"])
        if code != 0:
            raise _refused(container.logs(stdout=False).decode("utf-8", "replace"))
        _fetch(container, target)
    finally:
        container.remove(force=True)
    return image


def _no_torch(why: str) -> KitError:
    return KitError(
        "nothing here can make a checkpoint",
        why=f"that needs torch: no environment of scripts/vllm-env is there, and {why}",
        next_step="kit build demo   (or scripts/vllm-env)",
        code=ExitCode.PREFLIGHT,
    )


def _newest_image(client: DockerClient) -> str | None:
    """The tag of the youngest image of the kit, or None."""
    images = sorted(client.images.list("exl3kit"), key=lambda image: str(image.attrs["Created"]), reverse=True)
    tags = [tag for image in images for tag in image.tags if re.fullmatch(r"exl3kit:[0-9a-f]{12}", tag)]
    return tags[0] if tags else None


def _folder_with(config: bytes) -> bytes:
    """An archive of the folder that the container works in: writable for its user, with the configuration."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        folder = tarfile.TarInfo(_INSIDE.rpartition("/")[2])
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(folder)
        file = tarfile.TarInfo(f"{folder.name}/config.json")
        file.size, file.mode = len(config), 0o644
        tar.addfile(file, io.BytesIO(config))
    return content.getvalue()


def _fetch(container: Container, target: Path) -> None:
    """Copy the files of the container's output folder to `target`."""
    chunks, _ = container.get_archive(f"{_INSIDE}/out")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as spool:
        for chunk in chunks:
            spool.write(chunk)
        spool.seek(0)
        with tarfile.open(fileobj=spool) as tar:
            for member in tar:
                if member.isfile():
                    member.name = member.name.rpartition("/")[2]
                    tar.extract(member, target, filter="data")
