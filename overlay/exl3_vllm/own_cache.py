"""The compile cache of one rank."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from exl3_vllm.rank_settings import Settings


def use_own_cache(environ: Mapping[str, str], settings: Settings, built: Path) -> dict[str, str]:
    """`environ` with a compile cache of this rank and of this spec alone, seeded with what the image's build found out.

    Caches of two ranks, or of two settings of the plugin, may not meet: vLLM's keys leave out the device number and the
    plugin's switches. What stands there of another spec is removed.
    """
    root = environ.get("VLLM_CACHE_ROOT")
    if not root:
        return dict(environ)
    own = Path(root) / (settings.spec[:12] or "any")
    try:
        for other in Path(root).iterdir() if Path(root).is_dir() else ():
            if other != own:
                shutil.rmtree(other, ignore_errors=True)
        if built.is_dir() and not own.exists():
            shutil.copytree(built, own, copy_function=shutil.copyfile)
    except OSError as error:  # no reason to refuse: without it vLLM only starts later, by 20 s
        print(f"exl3 rank {settings.rank}: starts slower, {built} cannot be used: {error}", file=sys.stderr)
    return {**environ, "VLLM_CACHE_ROOT": str(own)}
