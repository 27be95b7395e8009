"""A node whose disk is too small for an image: refused before, and clean when the disk fills up all the same."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console
from rig_hosts import Rig, import_tiny, rig_script

from exl3kit import builders, built_image, context, nodes, transfer
from exl3kit.errors import ExitCode, KitError
from exl3kit.progress import Progress

STAMP = "6" * 64
DISK_MB = 300
IMAGE_MB = 60
DOCKERFILE = f"""FROM exl3kit-test-tiny:1
RUN /bin/busybox head -c {IMAGE_MB}000000 /dev/urandom > /noise
"""


def test_a_full_disk_refuses_the_image_and_keeps_nothing_of_it(no_rig: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # given an image of 60 MB on node1, and room for 70 MB on node2: enough for the stream, not for what it becomes
    rig_script("up", "--data-mb", str(DISK_MB))
    rig = Rig()
    for name in ("EXL3KIT_SSH_CONFIG", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, rig.env[name])
    import_tiny(rig, "node1")
    progress = Progress(Console(file=io.StringIO()))
    entries = [context.Entry("Dockerfile", DOCKERFILE.encode())]
    request = builders.Request(f"exl3kit:{STAMP[:12]}", {}, {built_image.STAMP: STAMP}, entries)
    with nodes.open_nodes("node1,node2") as (source, target):
        with progress.stage("image") as stage:
            builders.build(request, source, stage, progress)
        built = built_image.find(source, STAMP)
        assert built is not None
        surplus = target.free_bytes() // 1_000_000 - IMAGE_MB - 10
        rig.exec("node2", "sh", "-c", f"head -c {surplus}M /dev/zero > /var/lib/docker/surplus")
        free = target.free_bytes()

        # when it is copied as usual
        with pytest.raises(KitError, match="GB are missing") as refused:
            transfer.spread(source, [target], built, progress=progress)
        # then the room is missed before anything is sent
        assert (refused.value.code, refused.value.where) == (ExitCode.PREFLIGHT, "node node2")

        # when the room vanishes after that check
        with pytest.raises(KitError, match="broke off") as broken:
            transfer.copy(source, target, built, 0, progress, threading.Event())
        # then
        assert "no space left on device" in str(broken.value.why) and broken.value.code == ExitCode.BUILD
        assert built_image.find(target, STAMP) is None
        assert not target.engine.images.list(all=True)
        assert target.free_bytes() > free - 5_000_000

        # and with room the same copy succeeds
        rig.exec("node2", "rm", "/var/lib/docker/surplus")
        transfer.spread(source, [target], built, progress=progress)
        assert built_image.find(target, STAMP) is not None
