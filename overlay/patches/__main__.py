"""The overlay's patches of vLLM, as a program. Run it in `overlay/`, or with that folder on PYTHONPATH.

  python -m patches render VERSION DIR    write the rendered diffs of one version
  python -m patches check PATH            hold the contract and the patches against a wheel or site-packages; JSON
  python -m patches record WHEEL          write how the contract looks in that version, for a set that exists
  python -m patches apply ROOT            patch the vLLM in a site-packages folder; used by the image's build

Exit codes: 0 all is as recorded, 2 what was given cannot be read, 5 drift.
"""

from __future__ import annotations

import argparse
import json
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

from patches import contract, patchset
from patches.diffs import DiffError
from patches.sources import SourceError, Sources

USAGE, DRIFT = 2, 5


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m patches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    rendering = verbs.add_parser("render")
    rendering.add_argument("version", choices=patchset.versions())
    rendering.add_argument("target", type=Path)
    for verb in ("check", "record", "apply"):
        verbs.add_parser(verb).add_argument("path", type=Path)
    given = parser.parse_args()
    try:
        if given.verb == "render":
            return render(given.version, given.target)
        return {"check": check, "record": record, "apply": apply}[given.verb](given.path)
    except SourceError as error:
        print(f"patches: {error}", file=sys.stderr)
        return USAGE
    except DiffError as error:
        print(f"patches: {error}", file=sys.stderr)
        return DRIFT


def render(version: str, target: Path) -> int:
    """Write each diff of the version; print their paths."""
    chosen = patchset.load(version)
    target.mkdir(parents=True, exist_ok=True)
    for patch in chosen.patches:
        file = target / patch.file.removesuffix(".j2")
        file.write_text(chosen.render(patch), encoding="utf-8")
        print(file)
    return 0


def check(path: Path) -> int:
    """Print one JSON object: version, the set that it was held against, and a verdict for each symbol and patch."""
    sources = Sources(path)
    version = sources.version
    known = patchset.versions()
    chosen = version if version in known else known[-1]
    verdicts = list(contract.check(sources, chosen))
    drift = [verdict for verdict in verdicts if verdict.status != "same"]
    told = {"vllm": version, "set": chosen, "verdicts": list(map(contract.as_dict, verdicts)), "ok": not drift}
    print(json.dumps(told, indent=1))
    return DRIFT if drift else 0


def record(path: Path) -> int:
    """Write the index of the wheel's version."""
    sources = Sources(path)
    if sources.version not in patchset.versions():
        raise SourceError(f"vLLM {sources.version} has no set; write vllm-{sources.version}/manifest.yaml first")
    index = contract.record(sources)
    lacking = [symbol.key for symbol in contract.symbols() if symbol.key not in index]
    if lacking:
        raise SourceError(f"vLLM {sources.version} has no {', '.join(lacking)}")
    print(contract.write_index(index, patchset.HERE / f"vllm-{sources.version}"))
    return 0


def apply(root: Path) -> int:
    """Patch in place, after the whole contract was found to hold."""
    sources = Sources(root)
    version = sources.version
    if version not in patchset.versions():
        known = ", ".join(patchset.versions())
        print(f"patches: the overlay is not known to work with vLLM {version}, only with {known}", file=sys.stderr)
        return DRIFT
    drift = [verdict for verdict in contract.check(sources, version) if verdict.status != "same"]
    for verdict in drift:
        print(f"patches: {verdict.kind} {verdict.subject} {verdict.status}: {verdict.detail}", file=sys.stderr)
    if drift:
        return DRIFT
    for name, files in patchset.apply(root, patchset.load(version)):
        for file in files:
            recompile(root / file)
        print(f"patches: {name}: {', '.join(files) or 'was applied already'}")
    print(f"patches: {len(contract.symbols())} symbols of vLLM {version} are as the overlay needs them")
    return 0


def recompile(file: Path) -> None:
    """Replace bytecode that is there: unchecked bytecode of the unpatched file would be believed."""
    if Path(cache_from_source(str(file))).exists():
        py_compile.compile(
            str(file), doraise=True, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )


if __name__ == "__main__":
    sys.exit(main())
