"""The machine that the rig runs on: its programs, its disk, and how it reaches package mirrors."""

from __future__ import annotations

import configparser
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .shell import PREFLIGHT, RigError, names, run

# program -> Debian package that has it
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "mmdebstrap": "mmdebstrap",
}
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
OWN_CAS = "/usr/local/share/ca-certificates"

# How a machine is told to reach the network: copied from our environment into the nodes that may use the network.
NETWORK_ENVIRONMENT = re.compile(
    r"(PIP|UV)_[A-Z_]+|(http|https|no)_proxy|(HTTP|HTTPS|NO)_PROXY"
    r"|SSL_CERT_(FILE|DIR)|(REQUESTS_CA|CURL_CA)_BUNDLE|GIT_SSL_CAINFO"
)
# apt settings that decide whether a mirror is reachable and believed.
APT_SETTING = re.compile(r'Acquire::((http|https)::[^ ]*|Check-Valid-Until|Check-Date|Retries) "[^"]+";')


def need_root() -> None:
    if os.geteuid() != 0:
        raise RigError("the rig makes network namespaces and mounts, so it needs root: run it with sudo.")


def need_programs(template_missing: bool, install: bool) -> None:
    """Check that the programs the rig calls exist; with `install`, get the missing ones from the distribution.

    Raises:
        RigError: naming the packages to install.
    """
    wanted = [p for p in PROGRAMS if p != "mmdebstrap" or template_missing]
    packages = sorted({PROGRAMS[p] for p in wanted if shutil.which(p) is None})
    if not packages:
        return
    if not install:
        raise RigError(
            f"this machine lacks {names(packages)}: run the same command with --install, "
            f"or `apt-get install {' '.join(packages)}`."
        )
    run("apt-get", "update", "-q")
    run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-qy", "--no-install-recommends", *packages)


def need_disk(folder: Path, need_gb: float) -> None:
    """Refuse when the file system of `folder` has less than `need_gb` GiB free."""
    folder.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(folder).free / 2**30
    if free_gb < need_gb:
        raise RigError(
            f"{folder} has {free_gb:.1f} GiB free and the rig wants {need_gb:.1f} GiB: free some, or name another "
            "place (XDG_CACHE_HOME for templates, --disk-dir for the hosts' disks), or ask for less with --need-gb."
        )


def need_ground_for_overlays(folder: Path) -> None:
    """Refuse when `folder` cannot hold the writable layer of a host, as in most containers."""
    if run("stat", "--file-system", "--format=%T", str(folder)).stdout.strip() == "overlayfs":
        raise RigError(
            f"{folder} is on overlayfs, which cannot hold the hosts' own overlays: "
            "name a folder on ext4, xfs or tmpfs with --disk-dir."
        )


def os_release() -> tuple[str, str]:
    """This machine's distribution and codename, such as `("debian", "bookworm")`."""
    text = Path("/etc/os-release").read_text()
    found = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', text, re.MULTILINE))
    return found.get("ID", ""), found.get("VERSION_CODENAME", "")


def apt_sources(release: str) -> list[str]:
    """This machine's Debian mirrors as one-line sources, with the codename of `release` in place of its own.

    Raises:
        RigError: when this is no Debian, or its apt sources name no Debian mirror.
    """
    distribution, codename = os_release()
    if distribution != "debian":
        raise RigError(
            f"the rig takes its packages from Debian's mirrors and this machine is {distribution or 'unknown'}."
        )
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list"))]
    found = [entry for file in files if file.exists() for entry in one_line_entries(file.read_text())]
    for file in sorted(folder.glob("sources.list.d/*.sources")):
        found += stanza_entries(file.read_text())
    suites = [codename, f"{codename}-updates", f"{codename}-security"]
    mirrors = {suite: uri for uri, suite in found if suite in suites}
    if codename not in mirrors:
        raise RigError(
            f"the apt sources of this machine name no mirror for {codename}: add one to {folder}/sources.list."
        )
    return [f"deb {mirrors[s]} {s.replace(codename, release)} main" for s in suites if s in mirrors]


def one_line_entries(text: str) -> Iterator[tuple[str, str]]:
    """(uri, suite) of each `deb` line that offers the component main."""
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
        if match and "main" in match[3].split():
            yield match[1], match[2]


def stanza_entries(text: str) -> Iterator[tuple[str, str]]:
    """(uri, suite) of each deb822 stanza that offers the component main."""
    for stanza in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
        offered = "deb" in fields.get("Types", "").split() and "main" in fields.get("Components", "").split()
        if offered and fields.get("Enabled", "yes").lower() not in ("no", "false"):
            for suite in fields.get("Suites", "").split():
                yield fields.get("URIs", "").split()[0], suite


def apt_settings() -> list[str]:
    """This machine's apt options about reaching its mirrors: proxies, certificates, date checks."""
    dump = run("apt-config", "dump").stdout
    return [line for line in dump.splitlines() if APT_SETTING.fullmatch(line)]


def network_environment() -> dict[str, str]:
    """Proxy, certificate and pip variables of our own environment."""
    return {k: v for k, v in sorted(os.environ.items()) if NETWORK_ENVIRONMENT.fullmatch(k)}


def pip_configs() -> list[Path]:
    """The pip configuration files of this machine and user, weakest first."""
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [Path("/etc/pip.conf"), Path.home() / ".pip/pip.conf", config_home / "pip/pip.conf"]
    return [file for file in files if file.is_file()]


def local_package_folders() -> list[str]:
    """Folders of this machine that pip or uv is configured to take packages from.

    A `file:` index that ends in `/simple` links to files beside it, so the folder above it counts.
    """
    values = [v for k, v in os.environ.items() if re.fullmatch(r"(PIP|UV)_(FIND_LINKS|(EXTRA_)?INDEX_URL|INDEX)", k)]
    for file in pip_configs():
        parser = configparser.RawConfigParser()
        parser.read(file)
        keys = ("find-links", "index-url", "extra-index-url")
        values += [v for s in parser.sections() for k, v in parser.items(s) if k in keys]
    found = set()
    for place in " ".join(values).split():
        path = Path(place.removeprefix("file://"))
        if place.startswith("file://") and path.name == "simple":
            path = path.parent
        if path.is_absolute() and path.is_dir():
            found.add(str(path))
    return sorted(found)


def resolv_conf() -> str:
    """This machine's DNS configuration as a node can use it.

    Raises:
        RigError: when only a resolver on loopback is known, which a node cannot reach.
    """
    for file in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        text = file.read_text() if file.exists() else ""
        servers = re.findall(r"^nameserver\s+(\S+)", text, re.MULTILINE)
        if servers and not any(s.startswith("127.") or s == "::1" for s in servers):
            return text
    raise RigError(
        "--nat needs a DNS server that the nodes can reach, and /etc/resolv.conf names only this machine itself.",
        PREFLIGHT,
    )
