"""In the image on a node: fetch one commit of a repository into a Hugging Face cache; goes on where it stopped.

    python3 -I -c SOURCE REPO COMMIT CACHE TOKEN_FILE

Prints one JSON object a line: `{"bytes", "total"}` every second, last `{"folder"}` or `{"error", "says"}`.
"""

from __future__ import annotations

import errno
import json
import sys
import threading
from pathlib import Path

NETWORK = ("ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError")  # of httpx


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def present(folder: Path) -> int:
    """Bytes of the repository that are in the cache, unfinished files included."""
    total = 0
    for path in (folder / "blobs").glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total


def watch(folder: Path, total: int, ended: threading.Event) -> None:
    while not ended.wait(1):
        tell(bytes=present(folder), total=total)


def kind_of(error: BaseException) -> str:
    """One word for what went wrong, through every layer that wraps it."""
    from huggingface_hub import errors

    layer: BaseException | None = error
    seen: set[int] = set()
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        status = getattr(getattr(layer, "response", None), "status_code", None)
        if isinstance(layer, errors.GatedRepoError):
            return "gated"
        if isinstance(layer, errors.RepositoryNotFoundError | errors.RevisionNotFoundError) or status == 404:
            return "missing"
        if status in (401, 403):
            return "gated"
        if isinstance(layer, OSError) and layer.errno in (errno.ENOSPC, errno.EDQUOT):
            return "space"
        if type(layer).__name__ in NETWORK:
            return "network"
        layer = layer.__cause__ or layer.__context__
    return "failed"


def main() -> int:
    from huggingface_hub import HfApi, snapshot_download

    repo, revision, cache, token_file = sys.argv[1:5]
    secret = Path(token_file).read_text().strip() if Path(token_file).exists() else None
    folder = Path(cache) / f"models--{repo.replace('/', '--')}"
    ended = threading.Event()
    try:
        listed = HfApi(token=secret or False).model_info(repo, revision=revision, files_metadata=True).siblings or []
        total = sum(one.size or 0 for one in listed)
        tell(bytes=present(folder), total=total)
        threading.Thread(target=watch, args=(folder, total, ended), daemon=True).start()
        found = snapshot_download(repo, revision=revision, cache_dir=cache, token=secret or False, max_workers=4)
    except Exception as error:
        says = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        tell(error=kind_of(error), says=says.replace(secret, "***") if secret else says)
        return 1
    finally:
        ended.set()
    tell(bytes=present(folder), total=total)
    tell(folder=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
