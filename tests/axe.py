"""axe-core, the checker of accessibility, in a page that a browser shows.

It is taken from a wheel that carries it (no node, no npm), by hash, when a test asks for it: 0.6 MB that need not lie
in the repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from browser import Page

WHEEL = "axe-playwright-python==0.1.8 --hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8"
SCRIPT = "axe_playwright_python/axe.min.js"


def script(folder: Path) -> str:
    """Its source, from a wheel downloaded into `folder`."""
    wanted = folder / "axe.txt"
    wanted.write_text(WHEEL + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", folder]
    done = subprocess.run([*command, "-r", wanted], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("axe_*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(SCRIPT).decode()


def violations(tab: Page, source: str) -> list[str]:
    """Every rule that the page breaks, with the elements; all rules of axe apply, the advised ones too."""
    tab.value(f"{source};0")
    told = tab.value("axe.run().then(found => JSON.stringify([found.violations, found.passes]))")
    broken, passed = json.loads(told)
    assert len(broken) + len(passed) > 5, "axe looked at nothing"
    return [f"{one['id']}: {node['html'][:200]} {node['failureSummary']}" for one in broken for node in one["nodes"]]
