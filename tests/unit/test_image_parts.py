"""Contexts, builders' streams, pins of the root file system: everything about an image that needs no engine."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
import re
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from exl3kit import builders, built_image, context, image, image_store, paths, pins, recipes, rootfs
from exl3kit import lock as locks
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    recipe = recipes.load("demo", ["image.platform=linux/amd64"])
    return recipe, locks.make_lock(recipe)


def tar_of(entries: list[context.Entry]) -> bytes:
    out = io.BytesIO()
    context.write(entries, out)
    return out.getvalue()


# ---- the context -----------------------------------------------------------------------------------------------------


def test_the_same_files_make_the_same_tar_whatever_their_owner_mode_and_time(tmp_path: Path) -> None:
    # given one file twice, with another mode and time
    first, second = tmp_path / "a", tmp_path / "b"
    for file, mode, moment in ((first, 0o600, 1), (second, 0o666, 10**9)):
        file.write_text("x")
        file.chmod(mode)
        os.utime(file, (moment, moment))
    # when / then
    assert tar_of([context.Entry("f", first)]) == tar_of([context.Entry("f", second)])


def test_a_file_that_changed_since_the_lock_stops_the_build(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("new")
    with pytest.raises(KitError, match="is not the file that was locked") as refused:
        tar_of([context.Entry("overlay/a.py", file, hashlib.sha256(b"old").hexdigest())])
    assert refused.value.code == ExitCode.BUILD


def test_a_file_that_went_away_since_the_lock_stops_the_build(tmp_path: Path) -> None:
    """Given somebody who works in the checkout meanwhile, then it is said; no fault of the kit."""
    gone = context.Entry("overlay/a.py", tmp_path / "a.py", "0" * 64)
    for look in (lambda: gone.size, gone.open, lambda: tar_of([gone])):
        with pytest.raises(KitError, match=r"overlay/a\.py is not the file that was locked \(it went away") as refused:
            look()
        assert refused.value.code == ExitCode.BUILD


def test_a_failure_while_streaming_reaches_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("new")
    with pytest.raises(KitError, match="not the file"), context.streamed([context.Entry("a", file, "0" * 64)]) as tar:
        tar.read()


def test_a_builder_that_stops_reading_does_not_hang_the_context(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(8 << 20))
    with context.streamed([context.Entry("big", big)]) as tar:
        assert tar.read(1)


def test_every_stage_of_the_dockerfile_is_in_exactly_one_part() -> None:
    # given
    whole = (paths.REPO / "Dockerfile").read_text()
    # when
    parts = [
        context.environment_part(whole),
        context.adopted_part(whole),
        context.kernels_part(whole),
        context.image_part(whole, kernels=True),
    ]
    # then
    named = [re.findall(r"^FROM \S+ AS (\S+)$", part, re.MULTILINE) for part in parts]
    assert named == [["wheels", "environment"], ["adopted"], ["compiled", "kernels"], ["built", "image"]]
    assert sorted(name for names in named for name in names) == sorted(
        re.findall(r"^FROM \S+ AS (\S+)$", whole, re.MULTILINE)
    )
    assert all(part.startswith("ARG BASE\n") and "ARG KERNELS=kernels\n" in part for part in parts)
    assert "ENTRYPOINT" in parts[3] and not any(part.rstrip().rpartition("\n")[2].startswith("#") for part in parts)


def test_an_image_without_gpu_code_asks_for_no_kernels() -> None:
    part = context.image_part((paths.REPO / "Dockerfile").read_text(), kernels=False)
    assert re.findall(r"^FROM \S+ AS (\S+)$", part, re.MULTILINE) == ["image"]
    assert "--from=built" not in part and "ENTRYPOINT" in part


def test_the_dockerfile_asks_nothing_that_an_engine_of_2022_lacks() -> None:
    text = (paths.REPO / "Dockerfile").read_text()
    for absent in ("# syntax", "<<", "--link", "--mount", "--network", "ADD http", "--chmod"):
        assert absent not in text


def test_wheels_are_hash_checked_and_the_installer_stays_out(demo: tuple[Any, Any]) -> None:
    # given
    pinned = pins.load(demo[0].image)
    # when
    lines = context.requirements(pinned.wheels).splitlines()
    # then
    assert len(lines) == len(pinned.wheels) - 1
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    assert not any(line.startswith("uv==") for line in lines)


def test_an_overlay_change_keeps_the_environment(demo: tuple[Any, Any]) -> None:
    # given a lock whose overlay differs
    recipe, lock = demo
    data = json.loads(lock.canonical())
    changed = next(f for f in data["files"] if f["path"].startswith("overlay/"))
    changed["sha256"] = "0" * 64
    other, pinned = locks.Lock(data), pins.load(recipe.image)
    # when / then
    assert other.stamp != lock.stamp
    assert image.environment_key(other, pinned) == image.environment_key(lock, pinned)


def test_another_wheel_is_another_environment(demo: tuple[Any, Any]) -> None:
    recipe, lock = demo
    pinned = pins.load(recipe.image)
    fewer = dataclasses.replace(pinned, wheels=pinned.wheels[:-1])
    assert image.environment_key(lock, fewer) != image.environment_key(lock, pinned)


def test_labels_carry_the_whole_lock_and_nothing_of_the_machine(demo: tuple[Any, Any]) -> None:
    labels = image.labels(demo[1])
    assert json.loads(labels["io.exl3kit.lock"]) == demo[1].data
    assert labels["io.exl3kit.stamp"] == hashlib.sha256(labels["io.exl3kit.lock"].encode()).hexdigest()
    assert not any(os.environ["HOME"] in value for value in labels.values() if len(os.environ["HOME"]) > 5)
    assert max(map(len, labels.values())) < 120_000  # one argument of a command line holds 128 KiB


# ---- images that are there -------------------------------------------------------------------------------------------


def told_by_engine(image_id: str, *layers: str) -> Any:
    """An image as an engine's API tells it."""
    from docker.models.images import Image

    labels = {built_image.STAMP: "a" * 64}
    return Image({"Id": image_id, "Size": 1, "Config": {"Labels": labels}, "RootFS": {"Layers": list(layers)}})


def test_case_4_the_same_image_is_known_again_in_another_kind_of_store() -> None:
    """Given one image whose `.Id` differs from store to store, then it is the same; with another layer it is not."""
    here, there, other = (
        built_image.described(told_by_engine(*one), "exl3kit:aaaaaaaaaaaa")
        for one in (("sha256:1", "x", "y"), ("sha256:2", "x", "y"), ("sha256:1", "x", "z"))
    )
    assert here.same_content(there) and not here.same_content(other)


def held(*layers: str, made_from: str = "") -> image_store.Held:
    built = built_image.BuiltImage("exl3kit:x", "a" * 64, layers, 1)
    return image_store.Held("node1", built, datetime.now(UTC), (), (), (), made_from)


def test_prune_keeps_the_parts_of_the_images_that_stay_and_the_newest() -> None:
    # given an image with kernels and one without, and parts, newest first
    staying = [held("base1", "env1", "a", made_from="exl3kit-kernels:1"), held("base1", "env1", "b")]
    part = image_store.Part
    parts = {
        "exl3kit-env": [part("exl3kit-env:2", ("base2", "env2"), 1), part("exl3kit-env:1", ("base1", "env1"), 1),
                        part("exl3kit-env:0", ("base0", "env0"), 1)],
        "exl3kit-base": [part("exl3kit-base:1", ("base1",), 1), part("exl3kit-base:2", ("base2",), 1),
                         part("exl3kit-base:0", ("base0",), 1)],
        "exl3kit-kernels": [part("exl3kit-kernels:2", ("k2",), 1, "exl3kit-builder:2"),
                            part("exl3kit-kernels:1", ("k1",), 1, "exl3kit-builder:1"),
                            part("exl3kit-kernels:0", ("k0",), 1, "exl3kit-builder:0")],
        "exl3kit-builder": [part(f"exl3kit-builder:{number}", (f"b{number}",), 1) for number in (3, 2, 1, 0)],
    }  # fmt: skip
    # when
    going = image_store.superfluous_parts(parts, staying)
    # then
    assert [one.tag for one in going] == [f"{repository}:0" for repository in parts]
    # and without an image the newest of each stay, with what those were made from
    alone = [one.tag for one in image_store.superfluous_parts(parts, [])]
    assert "exl3kit-kernels:1" in alone and "exl3kit-builder:2" not in alone


# ---- builders --------------------------------------------------------------------------------------------------------


def reporter() -> Progress:
    return Progress(Console(file=io.StringIO(), width=200))


def test_buildx_argv_has_no_network_and_the_engines_own_builder() -> None:
    request = builders.Request("exl3kit:x", {"B": "2", "A": "1"}, {"l": "v"}, [], cache=False)
    argv = builders.buildkit_argv("docker", "buildx", request)
    assert argv[argv.index("--network") + 1] == "none" and argv[argv.index("--builder") + 1] == "default"
    assert "--no-cache" in argv and argv[-1] == "-"
    assert argv.index("A=1") < argv.index("B=2")


def test_buildkit_steps_are_read_from_pretty_printed_json_in_any_pieces(tmp_path: Path) -> None:
    # given what buildx writes: objects over several lines, then plain text
    vertex = {"digest": "d", "name": "[2/3] RUN make", "started": "2026-01-01T00:00:00.123456789Z"}
    done = {**vertex, "completed": "2026-01-01T00:00:02.623456789Z", "error": "exit code: 7"}
    cancelled = {**done, "digest": "e", "name": "[1/3] COPY x", "error": "context canceled"}
    printed = [{"vertex": "d", "data": base64.b64encode(b"half a ").decode()}]
    printed2 = [{"vertex": "d", "data": base64.b64encode(b"line {\nnext\n").decode()}]
    statuses = [{"vertexes": [vertex]}, {"logs": printed}, {"logs": printed2}, {"vertexes": [cancelled, done]}]
    text = "".join(json.dumps(status, indent=2) + "\n" for status in statuses) + "ERROR: failed to solve\n"
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    progress, log = reporter(), builders.Log(tmp_path / "log")
    # when
    with progress.stage("image") as stage, os.fdopen(reading, "rb") as stream:
        steps = builders.Steps(stage, progress, log)
        rest = steps.follow(stream)
    # then
    assert steps.failure() == ("[2/3] RUN make", "exit code: 7")
    assert log.lines == ["half a line {", "next"]
    assert "failed to solve" in rest


def test_a_finished_step_is_reported_once_with_its_seconds(tmp_path: Path) -> None:
    vertex = {"digest": "d", "name": "RUN  make\n all", "started": "2026-01-01T00:00:00Z",
              "completed": "2026-01-01T00:00:02.5Z"}  # fmt: skip
    progress = reporter()
    with progress.stage("image") as stage:
        steps = builders.Steps(stage, progress, builders.Log(tmp_path / "log"))
        steps.take({"vertexes": [vertex]})
        steps.take({"vertexes": [vertex]})
    assert [(t.name, t.seconds, t.depth) for t in progress.timings][:1] == [("RUN make all", 2.5, 1)]
    assert len(progress.timings) == 2


PLAIN = """#1 [internal] load build definition from Dockerfile
#1 sha256:77
#1 DONE 1.0s

#7 [wheels 2/3] COPY requirements.txt wheels/ /wheels/
#7 CACHED

#8 [wheels 3/3] RUN make all
#8 sha256:88
#8 0.345 because
#9 [environment 2/2] RUN true
#9 DONE 2.5s
#8 ERROR: executor failed running [/bin/sh -c make all]: exit code: 2
------
 > [wheels 3/3] RUN make all:
------
executor failed running [/bin/sh -c make all]: exit code: 2
"""


def test_plain_progress_of_the_2010_client(tmp_path: Path) -> None:
    # given / when
    progress, log = reporter(), builders.Log(tmp_path / "log")
    with progress.stage("image") as stage:
        steps = builders.PlainSteps(stage, progress, log)
        rest = steps.follow(io.BytesIO(PLAIN.encode()))
    # then
    assert steps.failure() == ("[wheels 3/3] RUN make all", "exit code: 2")
    assert [(t.name, t.seconds, t.outcome) for t in progress.timings if t.depth] == [
        ("[wheels 2/3] COPY requirements.txt wheels/ /wheels/", 0.0, "cached"),
        ("[environment 2/2] RUN true", 2.5, ""),
    ]
    assert log.lines == ["because"] and "exit code: 2" in rest


@pytest.mark.parametrize(
    ("buildx", "client", "kind"),
    [
        ("github.com/docker/buildx v0.13.1 abc", "Docker version 26.1.5, build x", "buildx"),
        ("github.com/docker/buildx 0.31.0 abc", "Docker version 29.0.0, build x", "buildx"),
        ("github.com/docker/buildx v0.11.2 abc", "Docker version 24.0.5, build x", None),
        ("", "Docker version 28.2.2, build x", None),
        ("", "Docker version 20.10.24+dfsg1, build x", "builtin"),
    ],
)
def test_which_buildkit_a_client_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buildx: str, client: str, kind: str | None
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && echo "{buildx}" || echo "{client}"\n')
    docker.chmod(0o755)
    monkeypatch.setenv(builders.DOCKER_VARIABLE, str(docker))
    assert builders.buildkit() == kind


def test_classic_steps_and_error(tmp_path: Path) -> None:
    progress, log = reporter(), builders.Log(tmp_path / "log")
    with progress.stage("image") as stage:
        steps = builders.ClassicSteps(stage, progress, log)
        for message in ({"stream": "Step 1/2 : FROM x\n"}, {"stream": " ---> Using cache\n"},
                        {"stream": "Step 2/2 : RUN false\n"}, {"stream": "oh no\n"},
                        {"errorDetail": {"code": 1}, "error": "returned a non-zero code: 1"}):  # fmt: skip
            steps.take(message)
        steps.end()
    assert (steps.current, steps.error) == ("RUN false", "returned a non-zero code: 1")
    assert [(t.name, t.outcome) for t in progress.timings][:1] == [("FROM x", "cached")]
    assert log.lines[-2:] == ["oh no", "returned a non-zero code: 1"]


# ---- the root file system --------------------------------------------------------------------------------------------


def base(**differs: Any) -> pins.Rootfs:
    fields = {"suite": "bookworm", "suites": ("bookworm", "bookworm-security"), "variant": "essential",
              "include": ("python3",), "packages": {"python3": "3.11.2-1+b1"}}  # fmt: skip
    return pins.Rootfs(**{**fields, **differs})


def machine(tmp_path: Path, release: str, sources: dict[str, str]) -> Path:
    (tmp_path / "os-release").write_text(release)
    for name, text in sources.items():
        (tmp_path / "apt" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apt" / name).write_text(text)
    return tmp_path


def test_mirrors_come_from_both_formats_of_apt_on_another_debian(tmp_path: Path) -> None:
    # given a machine that runs trixie
    etc = machine(tmp_path, 'ID=debian\nVERSION_CODENAME="trixie"\n', {
        "sources.list": "deb [signed-by=/x] http://one.example/debian trixie main contrib\n"
        "deb-src http://no trixie main\n",
        "sources.list.d/debian.sources": "Types: deb\nURIs: http://two.example/security\nSuites: trixie-security\n"
        "Components: main\n\nTypes: deb\nEnabled: no\nURIs: http://no\nSuites: trixie\nComponents: main\n",
    })  # fmt: skip
    # when / then
    assert rootfs.apt_sources(base(), etc) == [
        "deb http://one.example/debian bookworm main",
        "deb http://two.example/security bookworm-security main",
    ]


def test_a_machine_without_a_debian_mirror_is_told_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc = machine(tmp_path, 'ID=ubuntu\nVERSION_CODENAME=noble\nPRETTY_NAME="Ubuntu 24.04"\n', {})
    with pytest.raises(KitError, match="no Debian mirror") as refused:
        rootfs.apt_sources(base(), etc)
    assert "Ubuntu 24.04" in str(refused.value) and rootfs.MIRROR_VARIABLE in str(refused.value)
    monkeypatch.setenv(rootfs.MIRROR_VARIABLE, "http://mirror.example/debian")
    assert rootfs.apt_sources(base(suites=("bookworm",)), etc) == ["deb http://mirror.example/debian bookworm main"]


def test_a_root_file_system_of_another_processor_says_what_it_needs() -> None:
    """Given mmdebstrap's refusal, then the way out is another for another platform than this machine's."""
    said = ["I: automatically chosen mode: root", "E: install arch-test for foreign architecture support"]
    own, foreign = (rootfs._failed(said, platform) for platform in (pins.host(), "linux/riscv64"))
    assert "arch-test for foreign" in str(own) and "apt-get update" in str(own.next_step)
    assert "linux/riscv64" in str(foreign.next_step) and "qemu-user-static" in str(foreign.next_step)


def test_mirrors_that_cannot_be_read_are_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no network, then mmdebstrap's own words are the error, and no second run looks for newer versions."""
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\n"
        f"echo run >> {tmp_path}/runs\n"
        "echo 'E: Failed to fetch http://mirror/debian/dists/bookworm/InRelease  Temporary failure resolving'\n"
        "exit 25\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(rootfs, "mmdebstrap_argv", lambda *_: [str(program)])
    monkeypatch.setattr(rootfs, "apt_sources", lambda _: [])
    monkeypatch.setattr(rootfs, "_need_mmdebstrap", lambda: None)
    (tmp_path / "made").mkdir()
    with pytest.raises(KitError, match="Temporary failure resolving") as refused:
        rootfs._run(base(), pins.host(), tmp_path / "made" / "rootfs.tar", None)
    assert "apt-get update" in str(refused.value.next_step) and "kit bundle load" in str(refused.value.next_step)
    assert "is not here, and the Debian mirrors cannot be read (Failed to fetch" in str(refused.value)
    assert (tmp_path / "runs").read_text() == "run\n"


def test_preferences_leave_only_the_pinned_versions() -> None:
    text = rootfs.preference_text({"python3": "3.11.2-1+b1"})
    assert "Package: *\nPin: release *\nPin-Priority: -1" in text
    assert "Package: python3\nPin: version 3.11.2-1+b1\nPin-Priority: 1001" in text


def test_the_key_follows_packages_and_platform() -> None:
    assert rootfs.key(base(), "linux/amd64") == rootfs.key(base(), "linux/amd64")
    assert rootfs.key(base(), "linux/amd64") != rootfs.key(base(), "linux/arm64")
    assert rootfs.key(base(), "linux/amd64") != rootfs.key(base(packages={"python3": "4"}), "linux/amd64")


def test_packages_are_read_from_the_tar(tmp_path: Path) -> None:
    status = (
        "Package: a\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:2.0-1\nDepends: b\n\n"
        "Package: b\nVersion: 3\n"
    )
    with tarfile.open(tmp_path / "r.tar", "w") as archive:
        member = tarfile.TarInfo("./var/lib/dpkg/status")
        member.size = len(status)
        archive.addfile(member, io.BytesIO(status.encode()))
    assert rootfs.packages_of(tmp_path / "r.tar") == {"a": "1:2.0-1", "b": "3"}
