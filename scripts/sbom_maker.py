"""A lock (JSON on stdin) as CycloneDX 1.6 (stdout, or the file that is named): what `scripts/sbom` runs.

What the lock names is listed and nothing is looked up: wheels and files with their sha256, Debian packages with their
versions alone, a registry's base image with its digest. What only builds the kernels is of scope `excluded`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

NEEDED = ("base", "files", "lock", "platform", "vllm", "wheels")


def main() -> int:
    try:
        lock = json.loads(sys.stdin.read())
        if missing := [key for key in NEEDED if key not in lock]:
            raise ValueError(f"no {', '.join(missing)}")
    except (ValueError, TypeError) as error:
        print(f"scripts/sbom: this is no lock ({error})\n  next: `kit lock RECIPE --json` prints one", file=sys.stderr)
        return 2
    text = document(lock)
    if faults := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        print(f"scripts/sbom: not valid CycloneDX: {faults}", file=sys.stderr)
        return 5
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


def document(lock: Mapping[str, Any]) -> str:
    """The bill of materials; the same lock gives the same text."""
    spelled = json.dumps(lock, sort_keys=True, separators=(",", ":"), ensure_ascii=False)  # as the kit hashes it
    stamp = hashlib.sha256(spelled.encode()).hexdigest()
    image = Component(
        type=ComponentType.CONTAINER,
        name="exl3kit",
        version=stamp[:12],
        bom_ref=f"exl3kit:{stamp[:12]}",
        properties=[Property(name="io.exl3kit.stamp", value=stamp), Property(name="platform", value=lock["platform"])],
    )
    bom = Bom(serial_number=UUID(stamp[:32]), components=[*shipped(lock), *building(lock)])
    bom.metadata.component = image
    bom.metadata.timestamp = datetime.fromtimestamp(0, UTC)  # a lock has no date
    bom.register_dependency(image, [one for one in bom.components if one.scope is not ComponentScope.EXCLUDED])
    return str(JsonV1Dot6(bom).output_as_string(indent=1))


def shipped(lock: Mapping[str, Any]) -> Iterator[Component]:
    """What the image holds."""
    base = lock["base"]
    if "image" in base:
        name, _, tag = base["image"].rpartition(":")
        digest = str(base["digest"])
        yield Component(
            type=ComponentType.CONTAINER,
            name=name,
            version=tag,
            purl=PackageURL("oci", None, name.rpartition("/")[2], digest, {"repository_url": name, "tag": tag}),
            hashes=[sha256(digest.removeprefix("sha256:"))],
            bom_ref="base",
        )
    else:
        yield from debian(base["packages"], base["rootfs"], ComponentScope.REQUIRED, "")
    for one in lock["wheels"]:
        yield wheel(one, ComponentScope.REQUIRED, "")
    for one in lock["files"]:
        yield Component(
            type=ComponentType.FILE,
            name=one["path"],
            hashes=[sha256(one["sha256"])],
            scope=ComponentScope.REQUIRED,
            bom_ref=f"file:{one['path']}",
        )


def building(lock: Mapping[str, Any]) -> Iterator[Component]:
    """What compiles the kernels and is not in the image."""
    toolchain = lock.get("toolchain", {})
    named = [*toolchain.get("wheels", ()), *([toolchain["torch_headers"]] if "torch_headers" in toolchain else [])]
    for one in named:
        yield wheel(one, ComponentScope.EXCLUDED, "builder:")
    yield from debian(lock.get("builder", {}).get("packages", {}), "bookworm", ComponentScope.EXCLUDED, "builder:")


def debian(packages: Mapping[str, str], release: str, scope: ComponentScope, prefix: str) -> Iterator[Component]:
    for name, version in packages.items():
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            purl=PackageURL("deb", "debian", name, version, {"distro": release}),
            scope=scope,
            bom_ref=f"{prefix}deb:{name}",
        )


def wheel(one: Mapping[str, Any], scope: ComponentScope, prefix: str) -> Component:
    """A wheel of the lock; its file name says name and version when nothing else does."""
    name, version = one.get("name"), one.get("version")
    if name is None or version is None:
        name, version = one["filename"].split("-")[:2]
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=PackageURL("pypi", None, name.lower().replace("_", "-"), version, {"file_name": one["filename"]}),
        hashes=[sha256(one["sha256"])],
        scope=scope,
        bom_ref=f"{prefix}wheel:{one['filename']}",
    )


def sha256(content: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=content)


if __name__ == "__main__":
    sys.exit(main())
