"""Hosts that play DGX Sparks (`scripts/rig up --fake-gpu`): the doctor on them, a GPU recipe up to vLLM's start.

What they show is constructed from public reports (`rig_lib.gb10`); nothing here computes on a GPU.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit_verbs import kit, kit_argv
from rig_hosts import REPOSITORY, Completed, Rig, call, rig_script, room
from rig_lib.plan import NUMBER, SUBNET
from rig_lib.template import Template, cache_lock

NODES = "node1,node2"
RECIPE = """recipe: 1
name: played
model: {{path: {model}, served_name: played}}
image: {{base: {{rootfs: bookworm}}, vllm: 0.33.0, arch: ["12.1"], rates: [2], codebooks: [mcg]}}
parallel: {{nodes: 2, tensor: 2}}
fabric: {{require: rdma}}
serve: {{max_model_len: 256, max_num_batched_tokens: 256, max_num_seqs: 4, kv_cache_memory: 64MiB, enforce_eager: true,
        args: [--override-generation-config, '{{"temperature": 0.5, "note": "two words"}}'],
        env: {{NCCL_ALGO: Ring}}}}
"""


@pytest.fixture
def sparks(no_rig: None) -> Iterator[Rig]:
    rig_script("up", "--fake-gpu", *room())
    yield Rig()


def written(folder: Path) -> Path:
    path = folder / "played.yaml"
    path.write_text(RECIPE.format(model=REPOSITORY / "models" / "demo-moe"))
    return path


def found(done: Completed) -> dict[str, dict[str, tuple[str, str]]]:
    """Findings of `kit doctor --json`: node -> check -> (level, sentence); the first of each check."""
    assert done.returncode in (0, 3, 6), done.stdout + done.stderr
    result: dict[str, dict[str, tuple[str, str]]] = {}
    for one in json.loads(done.stdout)["findings"]:
        result.setdefault(one["node"], {}).setdefault(one["check"], (one["level"], one["says"]))
    return result


def test_the_doctor_on_two_played_sparks_and_on_what_befalls_them(sparks: Rig, tmp_path: Path) -> None:
    recipe = written(tmp_path)

    def doctor(*words: str) -> Completed:
        return kit(sparks, "doctor", recipe, "--nodes", NODES, "--json", *words)

    # given two Sparks as they should be
    begun = time.monotonic()
    done = doctor()
    assert time.monotonic() - begun < 120  # 5 s on an idle machine
    seen = found(done)
    for number, node in enumerate(("node1", "node2"), 1):
        assert seen[node]["GPU"][1].startswith("NVIDIA GB10 (12.1), driver 580.95.05, CUDA up to 13.0")
        assert seen[node]["GPU access"] == ("ok", "NVIDIA runtime")
        first, twin = f"{SUBNET}.{number}", f"10.78.{NUMBER}.{number}"
        ports = f"rocep1s0f0:1 on eth0 {first}/24 GID 3, roceP2p1s0f0:1 on eth1 {twin}/24 GID 3"
        assert seen[node]["RDMA"] == ("ok", ports)
    assert seen["node1-node2"]["reach"][1].startswith("one TCP stream: ") and "node2-node1" in seen
    for rank in ("rank 0 on node1", "rank 1 on node2"):
        settings = {one["name"]: (one["value"], one["source"]) for one in json.loads(done.stdout)["environment"][rank]}
        assert settings["NCCL_IB_HCA"] == ("=rocep1s0f0:1,roceP2p1s0f0:1", "facts")
        assert settings["NCCL_IB_GID_INDEX"] == ("3", "facts") and settings["NCCL_ALGO"] == ("Ring", "recipe")

    # when the GID table of a node is another after a reboot: case 13
    table = "/sys/class/infiniband/{}/ports/1"
    for hca in ("rocep1s0f0", "roceP2p1s0f0"):
        move = "for f in gids gid_attrs/types gid_attrs/ndevs; do cp $f/3 $f/7; done; cp gids/6 gids/3"
        sparks.exec("node1", "sh", "-c", f"cd {table.format(hca)} && {move}")
    environment = json.loads(doctor("--no-bandwidth").stdout)["environment"]["rank 0 on node1"]
    assert {one["name"]: one["value"] for one in environment}["NCCL_IB_GID_INDEX"] == "7"

    # when an adapter is down, a port taken, and the CDI specification older than the driver
    sparks.exec("node2", "sh", "-c", f"echo '1: DOWN' > {table.format('rocep1s0f0')}/state")
    listen = "use IO::Socket::INET; $l = IO::Socket::INET->new(LocalPort => 8000, Listen => 1) or die; sleep 600"
    sparks.exec("node1", "sh", "-c", f"setsid -f perl -e '{listen}' > /dev/null 2>&1; sleep 1")
    sparks.exec("node2", "sed", "-i", "s/580.95.05/580.65.06/", "/etc/cdi/nvidia.yaml")
    done = doctor("--no-bandwidth")
    seen = found(done)
    assert done.returncode == 3
    assert seen["node2"]["RDMA"] == ("refuse", "rocep1s0f0 behind eth0 is not active")
    assert seen["node2"]["GPU access"][0] == "warn" and "580.65.06" in seen["node2"]["GPU access"][1]
    assert seen["node1"]["ports"][0] == "refuse" and "port 8000 is in use by perl" in seen["node1"]["ports"][1]

    # when a node is gone: the other is still looked at
    sparks.link("node2", "down")
    try:
        done = kit(sparks, "doctor", "--nodes", NODES, "--json")
    finally:
        sparks.link("node2", "up")
    assert done.returncode == 6 and found(done)["node2"]["ssh and engine"][0] == "refuse"
    assert found(done)["node1"]["GPU"][0] == "ok"


STAND_IN = "STAND-IN FOR VLLM"
VLLM = f"""#!/usr/bin/python3
import json, os, sys
from pathlib import Path
devices = [str(path) for path in Path("/dev").rglob("*") if "nvidia" in str(path) or "infiniband" in str(path)]
told = {{"argv": sys.argv, "env": dict(os.environ), "uid": os.getuid(), "devices": sorted(devices)}}
print("{STAND_IN}", json.dumps(told), flush=True)
sys.exit(9)
"""


def small_image(rig: Rig, node: str, stamp: str) -> None:
    """An image with Python, the overlay and the stamp of the real one, in which `vllm` says how it was started."""
    template = Template("trixie", engine=False)
    with cache_lock():
        template.make()
    argv = [
        "tar",
        "-C",
        template.folder,
        "--exclude=./usr/share/*",
        "--exclude=./usr/lib/git-core",
        "--exclude=./var/*",
    ]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(REPOSITORY / "overlay" / "exl3_vllm", "usr/lib/python3/dist-packages/exl3_vllm")
        about = "usr/lib/python3/dist-packages/exl3_vllm-0.1.0.dist-info"
        for name, text in (
            ("usr/local/bin/vllm", VLLM),
            (f"{about}/METADATA", "Metadata-Version: 2.1\nName: exl3-vllm\nVersion: 0.1.0\n"),
            (f"{about}/entry_points.txt", "[vllm.general_plugins]\nexl3 = exl3_vllm:register\n"),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    packed = subprocess.run([*map(str, argv), "-cf", "-", "."], capture_output=True, check=True).stdout
    whole = packed[: packed.rindex(b"\0" * 1024)].rstrip(b"\0")
    whole += b"\0" * (-len(whole) % 512)  # one archive after the other
    labels = (f"LABEL io.exl3kit.stamp={stamp}", "ENV PATH=/usr/local/bin:/usr/bin:/bin")
    words = [word for one in labels for word in ("--change", one)]
    docker = [rig.status["docker"], "--host", rig.docker_host(node), "import", *words, "-", f"exl3kit:{stamp[:12]}"]
    done = subprocess.run(docker, input=whole + buffer.getvalue(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


STAMP_OF = """
import sys
from exl3kit import lock, recipes
made = lock.make_lock(recipes.load(sys.argv[1]))
print(made.stamp)
"""


@pytest.mark.full
def test_a_gpu_recipe_goes_all_the_way_to_vllms_start(sparks: Rig, tmp_path: Path) -> None:
    """Given an image of the recipe's stamp on one played Spark, then it is copied, checks pass, and the ranks start."""
    recipe = written(tmp_path)
    stamp = call(sys.executable, "-c", STAMP_OF, recipe, cwd=REPOSITORY).stdout.strip()
    small_image(sparks, "node1", stamp)

    # when
    argv = kit_argv("up", recipe, "--nodes", NODES, "--json", "--ready", "60")
    done = call(*argv, check=False, timeout=300, env=sparks.env, cwd=REPOSITORY)

    # then vLLM was started on each host with the GPU, the adapters and the network that the facts give
    assert done.returncode == 7, done.stdout + done.stderr
    for rank, node in ((0, "node1"), (1, "node2")):
        lines = [line for line in done.stderr.splitlines() if f"rank {rank} on {node} | {STAND_IN}" in line]
        assert lines, done.stderr
        said = json.loads(lines[0].partition(STAND_IN)[2])
        assert said["uid"] == 10001 and "/dev/infiniband/uverbs0" in said["devices"]
        assert said["env"]["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1" and said["env"]["NCCL_NET"] == "IB"
        assert said["env"]["VLLM_HOST_IP"] == f"{SUBNET}.{rank + 1}"
        assert '{"temperature": 0.5, "note": "two words"}' in said["argv"]
