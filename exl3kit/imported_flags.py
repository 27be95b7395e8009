"""Flags of a foreign `vllm serve` as keys of ours: one table, one function."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from exl3kit import recipe, vllm_arguments

if TYPE_CHECKING:
    from exl3kit.imported import Imported

IMAGE = {"base": {"rootfs": "bookworm"}, "vllm": "0.33.0"}
_PARALLEL = {"--tensor-parallel-size": "tensor", "--pipeline-parallel-size": "pipeline"}
_COUNTS = {
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
}
_CHOICES = {
    "--kv-cache-dtype": ("kv_cache_dtype", ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")),
    "--dtype": ("dtype", ("auto", "bfloat16", "float16", "float32")),
}
# Keys of sparkrun's defaults that name a flag when there is no command.
_DEFAULTS = {"tensor_parallel": "--tensor-parallel-size", "pipeline_parallel": "--pipeline-parallel-size"}


def of_default(key: str, value: Any) -> list[str]:
    """A default without a template as words of the command: `max_model_len: 4096` is `--max-model-len 4096`."""
    if isinstance(value, dict | list) or value is None or not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        return []
    flag = _DEFAULTS.get(key, "--" + key.replace("_", "-"))
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]


def pairs(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values; further words of one option (`--a x y`) come as one value joined by NUL."""
    flag: str | None = None
    values: list[str] = []
    for word in [*argv, None]:
        is_flag = word is not None and word.startswith("-") and not re.fullmatch(r"-\d.*", word)
        if word is None or is_flag:
            if flag is not None or values:
                yield flag or "", "\0".join(values) if values else None
            flag, equals, value = (word or "").partition("=")
            values = [value] if equals else []
        else:
            values.append(word)


def apply(made: Imported, written: str, value: str | None) -> None:
    """Map one option, or keep it and say why not."""
    key = f"command {written}" if written else "command words"
    if not written:
        made.tell(key, "refused", "words that belong to no option", value)
        return
    flag = vllm_arguments.owner(written) or written.replace("_", "-")
    done = _own_key(made, flag, value)
    if done:
        made.tell(key, "mapped", done)
    elif flag == "--host":
        made.tell(key, "refused", "an open API needs a key: set serve.listen: open and serve.api_key_file", value)
    elif flag == "--api-key":
        made.tell(key, "refused", "a key stands in no recipe: serve.api_key_file names a file that holds it", value)
    elif flag in vllm_arguments.KEYS:
        shown = "no value" if value is None else repr(value.replace("\0", " "))
        made.tell(key, "refused", f"{vllm_arguments.KEYS[flag]} does not take {shown}", value)
    elif flag in vllm_arguments.REASONS:
        made.tell(key, "refused", vllm_arguments.REASONS[flag], value)
    else:
        words = [written, *(value.split("\0") if value is not None else [])]
        faults = list(vllm_arguments.faults(words))
        if faults or any("\0" in word for word in words):
            made.tell(key, "refused", faults[0].what if faults else "no text", value)
        elif re.search(r"\{[A-Za-z_][\w-]*\}|\$", value or ""):
            made.tell(key, "refused", "its value is a placeholder that nothing fills", value)
        else:
            made.data.setdefault("serve", {}).setdefault("args", []).extend(words)
            made.tell(key, "mapped", "serve.args")


def _own_key(made: Imported, flag: str, value: str | None) -> str | None:
    """The key of ours that now holds the option, None when there is none or it does not take the value."""
    number = int(value) if value is not None and re.fullmatch(r"[1-9]\d{0,8}", value) else None
    if flag in _PARALLEL and number is not None and number <= 256:
        made.data.setdefault("parallel", {})[_PARALLEL[flag]] = number
        return f"parallel.{_PARALLEL[flag]}"
    if flag in _COUNTS and (number is not None or value in ("auto", "-1")):
        if number is not None:
            made.serve(_COUNTS[flag], number)
        return f"serve.{_COUNTS[flag]}" + ("" if number is not None else ", unset: vLLM's own")
    if flag == "--kv-cache-memory-bytes" and value and re.fullmatch(r"[1-9]\d{3,17}", value) and int(value) % 1024 == 0:
        made.serve("kv_cache_memory", recipe.format_size(int(value)))
        return "serve.kv_cache_memory"
    if flag in _CHOICES and value in _CHOICES[flag][1]:
        made.serve(_CHOICES[flag][0], value)
        return f"serve.{_CHOICES[flag][0]}"
    if flag == "--enforce-eager" and value is None:
        made.serve("enforce_eager", True)
        return "serve.enforce_eager"
    if flag == "--enable-expert-parallel" and value is None:
        made.data.setdefault("parallel", {})["expert"] = True
        return "parallel.expert"
    return _server(made, flag, value, number) or _fraction(made, flag, value) or _speculative(made, flag, value)


def _server(made: Imported, flag: str, value: str | None, number: int | None) -> str | None:
    if flag == "--port" and number is not None and 1024 <= number <= 65535:
        made.serve("port", number)
        return "serve.port"
    if flag == "--host" and value in ("127.0.0.1", "localhost", "::1"):
        return "serve.listen: loopback"
    if flag == "--served-model-name" and value and "\0" not in value and len(value) <= 200 and value.isprintable():
        if "{" in value or not made.data["model"]:
            return None
        made.data["model"]["served_name"] = value
        return "model.served_name"
    if flag == "--revision" and value and re.fullmatch(r"[0-9a-f]{40}", value) and made.data["model"].get("repo"):
        made.data["model"]["revision"] = value
        return "model.revision"
    return None


def _fraction(made: Imported, flag: str, value: str | None) -> str | None:
    if flag != "--gpu-memory-utilization" or not re.fullmatch(r"0?\.\d{1,6}|1(\.0*)?", value or ""):
        return None
    share = float(value or 0)
    if share <= 0:
        return None
    made.serve("gpu_memory_utilization", share)
    return "serve.gpu_memory_utilization"


def _speculative(made: Imported, flag: str, value: str | None) -> str | None:
    if flag != "--speculative-config":
        return None
    try:
        told = json.loads(value or "")
    except ValueError:
        return None
    known = {"method", "num_speculative_tokens", "model"}
    if not isinstance(told, dict) or not set(told) <= known or not {"method", "num_speculative_tokens"} <= set(told):
        return None
    made.serve("speculative", told)
    return "serve.speculative"
