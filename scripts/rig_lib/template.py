"""Root file systems of the nodes, made once from Debian packages and then only read (they are the lower layer)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import host
from .plan import cache_dir
from .shell import BUILD, RigError, run, tail

# The engine of a node, and what tests look at it with; busybox-static is the raw material of test images.
ENGINE = {
    "trixie": "docker.io,docker-cli,docker-buildx,docker-compose",
    "bookworm": "docker.io,mount",  # engine 20.10: no buildx package, and its compose is the Python one
}
COMFORT = "openssh-server,iproute2,iptables,iputils-ping,ca-certificates,procps,rsync,busybox-static"
BARE = "python3,git,ca-certificates"
OPERATOR_RELEASE = "trixie"  # whose docker, buildx, compose and iptables the operator's side uses


@dataclass(frozen=True)
class Template:
    """One kind of root file system."""

    release: str
    engine: bool

    @property
    def packages(self) -> str:
        return f"{ENGINE[self.release]},{COMFORT}" if self.engine else BARE

    @property
    def variant(self) -> str:
        """What comes before the packages: for a bare node what Debian's own container images have."""
        return "apt" if self.engine else "minbase"

    @property
    def apt_options(self) -> list[str]:
        """Without recommended packages an engine node is 549 MB; a bare node keeps Debian's own default."""
        return [*host.apt_settings(), *(['APT::Install-Recommends "false";'] if self.engine else [])]

    @property
    def folder(self) -> Path:
        inputs = "\n".join([self.variant, self.packages, *self.apt_options, *host.apt_sources(self.release)])
        kind = "engine" if self.engine else "bare"
        key = hashlib.sha256(inputs.encode()).hexdigest()[:8]
        return cache_dir() / "templates" / f"{self.release}-{kind}-{key}"

    def exists(self) -> bool:
        return self.folder.exists()

    def make(self) -> None:
        """Make the template unless it exists. Takes 20 to 30 s and a download of about 100 MB.

        Raises:
            RigError: with the last lines of mmdebstrap's log.
        """
        if self.exists():
            return
        partial = self.folder.with_name(f".{self.folder.name}.partial")
        log = self.folder.with_suffix(".log")
        run("rm", "-rf", "--one-file-system", str(partial))
        argv = ["mmdebstrap", "--mode=root", f"--variant={self.variant}", f"--include={self.packages}"]
        argv += ["--dpkgopt=force-unsafe-io", *(f"--aptopt={option}" for option in self.apt_options)]
        argv += [self.release, str(partial), *host.apt_sources(self.release)]
        with log.open("w") as out:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        if done.returncode:
            run("rm", "-rf", "--one-file-system", str(partial))
            raise RigError(
                f"making the {self.release} template failed; the end of {log}:\n{tail(log.read_text())}", BUILD
            )
        for key in partial.glob("etc/ssh/ssh_host_*"):
            key.unlink()  # every node gets its own
        partial.rename(self.folder)


def operator_template() -> Template:
    return Template(OPERATOR_RELEASE, engine=True)


def any_operator_template() -> Path | None:
    """One that exists, made with whatever settings: taking a rig down must not depend on today's."""
    return next(cache_dir().glob(f"templates/{OPERATOR_RELEASE}-engine-*[0-9a-f]"), None)


@contextmanager
def cache_lock() -> Iterator[None]:
    """One rig command at a time: templates are made once, and state changes in one order."""
    folder = cache_dir() / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("rig: waits for another rig command to end", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
