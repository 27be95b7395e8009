"""A Debian root file system with exactly the pinned package versions, made by mmdebstrap from the machine's mirrors.

No container registry is involved. The result is smaller than the usual base images (bookworm with Python: 101 MB, 87
packages) because it has no apt: nothing is ever installed into it later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from exl3kit import offline, paths, pins, side_by_side
from exl3kit.errors import ExitCode, KitError

if TYPE_CHECKING:
    from exl3kit.progress import Stage

log = logging.getLogger(__name__)

MIRROR_VARIABLE = "EXL3KIT_DEBIAN_MIRROR"
SOURCE_DATE = 1_700_000_000  # seconds since 1970: no file of the root file system is younger
NOT_WANTED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")

# Merged /usr from the start, so that the small usr-is-merged serves and usrmerge with its 50 MB of Perl does not come.
MERGE_USR = 'for d in bin sbin lib lib64; do mkdir -p "$1/usr/$d"; ln -s "usr/$d" "$1/$d"; done'
# What would tell one machine from another: its mirror, our temporary folder, the hour.
FORGET = (
    'rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/hostname "$1"/etc/resolv.conf; '
    'find "$1"/var/log -type f -delete'
)
# apt settings of the machine that decide whether a mirror is reachable and believed.
_APT_SETTING = re.compile(r'Acquire::((http|https)::[^ ]*|Check-Valid-Until|Check-Date|Retries|ForceIPv4) "[^"]+";')


def key(base: pins.Rootfs, platform: str) -> str:
    """64 hex digits over everything that decides the content: packages, platform and how mmdebstrap is asked."""
    fields = {**asdict(base), "packages": dict(base.packages), "platform": platform}
    fields["options"] = [SOURCE_DATE, *NOT_WANTED, MERGE_USR, FORGET]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def place(base: pins.Rootfs, platform: str) -> Path:
    """Where its tar lies in the cache, once it is made."""
    return paths.cache_dir("rootfs") / f"{key(base, platform)[:16]}.tar"


def make(base: pins.Rootfs, platform: str, stage: Stage | None = None) -> Path:
    """The root file system as a tar, from the cache or made now (20 to 60 s).

    Raises `KitError`: preflight when mmdebstrap is missing, build when a pinned version has vanished from the mirrors.
    """
    tar = place(base, platform)
    if not tar.exists():
        offline.refuse([f"the root file system of {base.suite} with {len(base.packages)} packages"])
        _need_mmdebstrap()
        with tempfile.TemporaryDirectory(prefix=".rootfs-", dir=tar.parent) as folder:
            made = Path(folder) / "rootfs.tar"
            _run(base, platform, made, stage)
            made.rename(tar)
    found = packages_of(tar)
    if found != dict(base.packages):
        tar.unlink()
        raise _differs(base.packages, found)
    if stage is not None:
        stage.conclude(f"{len(found)} packages, {tar.stat().st_size / 1e6:.0f} MB")
    return tar


def packages_of(tar: Path) -> dict[str, str]:
    """Debian package -> version, from the dpkg status inside a root file system's tar."""
    with tarfile.open(tar) as archive:
        member = archive.extractfile("./var/lib/dpkg/status")
        assert member is not None
        text = member.read().decode()
    return dict(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)$", text, re.MULTILINE))


def resolve(base: pins.Rootfs, platform: str) -> dict[str, str]:
    """The package versions that the mirrors offer now, for `kit lock --update`; nothing is installed (5 s).

    Works for a platform that this machine cannot run. `base.packages` is not looked at.
    """
    _need_mmdebstrap()
    with tempfile.TemporaryDirectory(prefix="kit-rootfs-") as folder:
        preferences = Path(folder) / "preferences"
        preferences.write_text(preference_text({}))
        preferences.parent.chmod(0o755)
        argv = mmdebstrap_argv(base, platform, Path("/dev/null"), preferences, apt_sources(base), apt_settings())
        done = subprocess.run(
            [argv[0], "--simulate", "--verbose", "--skip=check/qemu", *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    found = dict(re.findall(r"^Inst (\S+) \((\S+) ", done.stdout + done.stderr, re.MULTILINE))
    if done.returncode or not found:
        raise _failed(done.stderr.splitlines(), pins.host())  # nothing of that platform was run
    return found


def mmdebstrap_argv(
    base: pins.Rootfs, platform: str, out: Path, preferences: Path, sources: Sequence[str], settings: Sequence[str]
) -> list[str]:
    """argv of the run that writes the tar `out`."""
    settings = [*settings, 'APT::Install-Recommends "false";', f'Dir::Etc::Preferences "{preferences}";']
    return [
        "mmdebstrap",
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        f"--variant={base.variant}",
        f"--architectures={platform.removeprefix('linux/')}",
        f"--include={','.join(base.include)}",
        "--format=tar",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in NOT_WANTED),
        *(f"--aptopt={setting.removesuffix(';')}" for setting in settings),
        f"--setup-hook={MERGE_USR}",
        f"--customize-hook={FORGET}",
        base.suite,
        str(out),
        *sources,
    ]


def preference_text(packages: Mapping[str, str]) -> str:
    """apt preferences that leave exactly the pinned versions installable; without any, all but usrmerge."""
    forbidden = "*" if packages else "usrmerge"
    stanzas = [f"Package: {forbidden}\nPin: release *\nPin-Priority: -1\n"]
    for name, version in sorted(packages.items()):
        stanzas.append(f"Package: {name}\nPin: version {version}\nPin-Priority: 1001\n")
    return "\n".join(stanzas)


def _run(base: pins.Rootfs, platform: str, out: Path, stage: Stage | None) -> None:
    preferences = out.with_name("preferences")
    preferences.write_text(preference_text(base.packages))
    out.parent.chmod(0o755)  # apt drops its privileges and must still read the preferences
    argv = mmdebstrap_argv(base, platform, out, preferences, apt_sources(base), apt_settings())
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(SOURCE_DATE), "LC_ALL": "C"}
    said: list[str] = []
    with side_by_side.program(argv, env=environment) as process:  # it unmounts and removes its folder when stopped
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            log.debug("mmdebstrap: %s", said[-1])
            if stage is not None and line.startswith("I: "):
                stage.say(line[3:].strip().rstrip("."))
    if process.returncode:
        if any(line.startswith("E: Failed to fetch") and "/dists/" in line for line in said):
            raise _unread(base, said)  # to ask the mirrors what they offer would take a minute more
        if stage is not None:
            stage.say("it failed: the mirrors are asked what they offer now")
        offered = resolve(base, platform)
        raise _differs(base.packages, offered) if offered != dict(base.packages) else _failed(said, platform)


def _need_mmdebstrap() -> None:
    if shutil.which("mmdebstrap") is None:
        raise KitError(
            "there is no mmdebstrap here, which makes the image's root file system from Debian packages",
            where="image.base",
            next_step="`apt-get install mmdebstrap`, or choose a recipe whose base is a registry reference",
            code=ExitCode.PREFLIGHT,
        )


def _differs(pinned: Mapping[str, str], offered: Mapping[str, str]) -> KitError:
    names = [name for name in sorted({*pinned, *offered}) if pinned.get(name) != offered.get(name)]
    told = [f"{n} {pinned.get(n, 'absent')} is pinned, {offered.get(n, 'none')} is offered" for n in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return KitError(
        "the Debian mirrors no longer offer what is pinned",
        where="image.base",
        why=", ".join(told) + more,
        next_step="kit lock --update RECIPE   (then review and commit the pins that changed)",
        code=ExitCode.BUILD,
    )


def _unread(base: pins.Rootfs, said: Sequence[str]) -> KitError:
    return KitError(
        f"the root file system of {base.suite} is not here, and the Debian mirrors cannot be read",
        where="image.base",
        why=next(line for line in said if line.startswith("E: ")).removeprefix("E: "),
        next_step="start again when `apt-get update` works here, "
        "or `kit bundle load FILE` of one made where there is a network",
        code=ExitCode.BUILD,
    )


def _failed(said: Sequence[str], platform: str) -> KitError:
    next_step = "check that `apt-get update` works here"
    if platform != pins.host():  # packages configure themselves by programs of their own platform
        next_step = f"fetch on a machine that is {platform} itself and bring it with `kit bundle`, or"
        next_step += " `apt-get install arch-test qemu-user-static` here"
    own_words = [line for line in said if line.startswith("E: ")]
    return KitError(
        "mmdebstrap could not make the root file system",
        where="image.base",
        why=(own_words or list(said) or ["it said nothing"])[0],
        next_step=next_step,
        code=ExitCode.BUILD,
    )


# ---- this machine's mirrors ------------------------------------------------------------------------------------------


def apt_sources(base: pins.Rootfs, etc: Path = Path("/etc")) -> list[str]:
    """One-line apt sources for the suites of a base, from the mirrors that this machine uses.

    On a machine that is no Debian, `EXL3KIT_DEBIAN_MIRROR` names the mirror. Raises `KitError` (preflight) without one.
    """
    release = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', (etc / "os-release").read_text(), re.MULTILINE))
    own = release.get("VERSION_CODENAME", "") if release.get("ID") == "debian" else ""
    offered = {of: uri for uri, of in _entries(etc / "apt")} if own else {}
    if mirror := os.environ.get(MIRROR_VARIABLE):
        own, offered = base.suite, dict.fromkeys(base.suites, mirror)
    # bookworm-security of the base is trixie-security on a machine that runs trixie.
    there = {suite: offered.get(suite.replace(base.suite, own, 1)) for suite in base.suites} if own else {}
    missing = [suite for suite in base.suites if there.get(suite) is None]
    if missing:
        raise KitError(
            f"no Debian mirror is known here for {', '.join(missing)}",
            where="image.base",
            why="its apt sources name none" if own else f"this machine is {release.get('PRETTY_NAME', 'unknown')}",
            next_step=f"set {MIRROR_VARIABLE} to the URL of a Debian mirror",
            code=ExitCode.PREFLIGHT,
        )
    return [f"deb {mirror} {suite} main" for suite, mirror in there.items()]


def _entries(apt: Path) -> Iterator[tuple[str, str]]:
    """(uri, suite) of each source that offers the component main, in either of apt's two formats."""
    for file in [apt / "sources.list", *sorted(apt.glob("sources.list.d/*.list"))]:
        for line in file.read_text().splitlines() if file.exists() else ():
            match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
            if match and "main" in match[3].split():
                yield match[1], match[2]
    for file in sorted(apt.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", file.read_text()):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
            enabled = fields.get("Enabled", "yes").lower() not in ("no", "false")
            if enabled and "deb" in fields.get("Types", "").split() and "main" in fields.get("Components", "").split():
                for of in fields.get("Suites", "").split():
                    yield fields["URIs"].split()[0], of


def apt_settings() -> list[str]:
    """This machine's apt options about reaching its mirrors: proxies, certificates, date checks."""
    if shutil.which("apt-config") is None:
        return []
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    return [line for line in dump.splitlines() if _APT_SETTING.fullmatch(line)]
