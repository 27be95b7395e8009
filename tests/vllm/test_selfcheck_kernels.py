"""The self-check of the kernels' operators, over the schemas that the library's source declares."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from engines import REPO
from exl3_vllm.selfcheck_kernels import EXPECTED, wrong_operators

BIND = REPO / "overlay" / "csrc" / "bind.cpp"


def declared() -> list[str]:
    """The operators' schemas as the library would register them: adjacent string literals joined."""
    calls = re.findall(r'm\.def\(((?:\s*"[^"]*")+)\s*\)', BIND.read_text())
    return ["".join(re.findall(r'"([^"]*)"', call)) for call in calls]


# Registers schemas in a process of its own, where no kernel library is needed for them to be there.
REGISTER = """
import sys, torch
from exl3_vllm.selfcheck_kernels import found_operators, wrong_operators
library = torch.library.Library("exl3", "FRAGMENT")
for schema in sys.argv[1:]:
    library.define(schema)
print("\\n".join(wrong_operators(found_operators())))
"""


def told_of(schemas: list[str]) -> str:
    done = subprocess.run([sys.executable, "-c", REGISTER, *schemas], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_operators_that_the_source_declares_pass() -> None:
    schemas = declared()
    assert {schema.partition("(")[0] for schema in schemas} == set(EXPECTED)
    assert told_of(schemas) == ""


def test_a_missing_operator_and_a_changed_one_are_named() -> None:
    # given a library without one operator, in which another takes one argument more
    schemas = [schema for schema in declared() if not schema.startswith("exl3_fat_gemm_scatter(")]
    schemas = [schema.replace("finish(", "finish(int stream, ") for schema in schemas]
    # when / then
    told = told_of(schemas)
    assert "the kernel library has no operator exl3_fat_gemm_scatter" in told
    assert "finish takes 5 (stream, x, a_scale, svh, out) arguments, the overlay gives 4" in told
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize("name", EXPECTED)
def test_every_operator_is_looked_at(name: str) -> None:
    assert len(list(wrong_operators({**EXPECTED, name: EXPECTED[name][:-1]}))) == 1
    assert len(list(wrong_operators({key: value for key, value in EXPECTED.items() if key != name}))) == 1
