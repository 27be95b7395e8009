"""The symbol check passes what is whole, and fails each kind of damage naming the symbol or the target."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import compiler
import link
import pytest
import units
from exl3_vllm import fatbin
from exl3_vllm import symbols as check
from workshop import REPO, Edited, Symbols, Workshop


@dataclass(frozen=True)
class Miscompiled(compiler.Request):
    """A request whose objects get other GPU code than the manifest will claim."""

    codes: tuple[str, ...] = ()

    def gencode(self) -> list[str]:
        return [f"-gencode={code}" for code in self.codes]


def counterfeit(workshop: Workshop, out: Path, source: Path, *codes: str) -> Path:
    """A library that claims what an honest build holds, but whose objects come from ``source`` and ``codes``."""
    honest = workshop.request()
    tools = workshop.tools(honest.host)
    jobs = units.expand(units.read_units(honest.source), [4.0], ["mcg"])
    claims = link.manifest(compiler.compile_all(jobs, honest, tools, workshop.cache, 2), honest, tools)
    request = replace(honest, source=source)
    if codes:
        request = Miscompiled(source, request.targets, request.rates, request.codebooks, request.host, codes=codes)
    jobs = units.expand(units.read_units(source), [4.0], ["mcg"])
    link.link(compiler.compile_all(jobs, request, tools, workshop.cache, 2), claims, tools, out)
    return out


def test_a_whole_library_passes_for_every_target_and_tier(native: Path, symbols: Symbols) -> None:
    asked = ("--targets", "12.0,12.1", "--rates", "4,2.5", "--codebooks", "mcg")
    for tier in ("auto", "grouped", "kernel", "batched", "legacy", "none"):
        code, report = symbols(native, *asked, "--tier", tier)
        assert (code, report["errors"], report["warnings"]) == (0, [], [])
    table = {row["symbol"]: row for row in symbols(native)[1]["symbols"]}
    assert [table["exl3_fat_moe_gateup"][column] for column in ("exported", "12.0", "12.1")] == ["yes"] * 3
    assert table["exl3_last_error"]["12.1"] == "host"


def test_the_report_counts_kernels_registers_and_spills_per_target(native: Path, symbols: Symbols) -> None:
    report = symbols(native)[1]
    assert set(report["resources"]) == {"12.0", "12.1"} and report["ptx"] == ["12.0"]
    for use in report["resources"].values():
        assert use["kernels"] == 3 and use["spilled"] == 0 and 0 < use["max_registers"] <= 64


def test_an_arm64_library_is_checked_on_this_host(arm64: Path, symbols: Symbols) -> None:
    code, report = symbols(arm64, "--host", "aarch64")
    assert (code, report["host"], report["errors"]) == (0, "aarch64", [])
    code, report = symbols(arm64, "--host", "x86_64")
    assert code == 5 and report["errors"] == ["built for aarch64 hosts, x86_64 asked"]


def test_case_1_a_removed_symbol_is_named_with_its_tier(
    workshop: Workshop, edited: Edited, tmp_path: Path, symbols: Symbols
) -> None:
    source = edited({"dispatch.cpp": ("DISPATCHED(exl3_fat_gemm_scatter)", "")})
    workshop.build(tmp_path / "x.so", workshop.request(source))
    code, report = symbols(tmp_path / "x.so", "--tier", "kernel")
    assert code == 5
    assert report["errors"] == ["symbol exl3_fat_gemm_scatter is missing (tier kernel calls it)"]
    assert symbols(tmp_path / "x.so", "--tier", "legacy")[0] == 0


def test_an_op_without_kernels_is_named(workshop: Workshop, edited: Edited, tmp_path: Path, symbols: Symbols) -> None:
    source = edited({"grouped.cu": (" exl3_fat_moe_down\n", "\n")})
    workshop.build(tmp_path / "x.so", workshop.request(source))
    code, report = symbols(tmp_path / "x.so")
    assert code == 5
    assert report["errors"] == ["symbol exl3_fat_moe_down has no kernels (the manifest names none for it)"]


def test_a_kernel_missing_on_one_target_is_named_with_its_ops(
    workshop: Workshop, edited: Edited, tmp_path: Path, symbols: Symbols
) -> None:
    source = edited({"grouped.cu": ("__global__ void specimen_gather(", "__global__ void specimen_gatherer(")})
    (source / "grouped.cu").write_text((source / "grouped.cu").read_text().replace("gather<<<", "gatherer<<<"))
    code, report = symbols(counterfeit(workshop, tmp_path / "x.so", source))
    assert code == 5
    assert [error.split(" (")[0] for error in report["errors"]] == ["kernel _Z15specimen_gatherPKfPf"] * 2
    assert "exl3_fat_moe_gateup" in report["errors"][0] and report["errors"][1].endswith("missing on target 12.1")


def test_case_5_only_sm_90_fails_naming_the_targets(workshop: Workshop, tmp_path: Path, symbols: Symbols) -> None:
    honest = workshop.build(tmp_path / "sm90.so", workshop.request(targets=("9.0",)))
    assert honest["targets"] == ["9.0"] and symbols(tmp_path / "sm90.so")[0] == 0
    code, report = symbols(tmp_path / "sm90.so", "--targets", "12.0,12.1")
    assert code == 5
    assert report["errors"] == [f"target {t} is missing (machine code: 9.0)" for t in ("12.0", "12.1")]


def test_one_target_of_two_fails_naming_the_other(workshop: Workshop, tmp_path: Path, symbols: Symbols) -> None:
    source = workshop.request().source
    file = counterfeit(workshop, tmp_path / "x.so", source, "arch=compute_120,code=sm_120")
    code, report = symbols(file)
    assert code == 5 and report["errors"] == ["target 12.1 is missing (machine code: 12.0)"]


def test_ptx_alone_warns(workshop: Workshop, tmp_path: Path, symbols: Symbols) -> None:
    source = workshop.request().source
    file = counterfeit(workshop, tmp_path / "x.so", source, "arch=compute_120,code=compute_120")
    code, report = symbols(file)
    assert code == 0 and report["errors"] == []
    assert [warning.split(":")[0] for warning in report["warnings"]] == [
        f"target {target} has no machine code, only PTX of 12.0" for target in ("12.0", "12.1")
    ]


def test_a_stripped_file_fails(native: Path, tmp_path: Path, symbols: Symbols) -> None:
    stripped = shutil.copy(native, tmp_path / "stripped.so")
    subprocess.run(["strip", stripped], check=True)
    code, report = symbols(stripped)
    assert code == 5 and report["errors"][0].startswith("no symbol table: the file was stripped")


def test_a_file_without_gpu_code_fails_for_every_target(native: Path, tmp_path: Path, symbols: Symbols) -> None:
    emptied = tmp_path / "emptied.so"
    argv = ["objcopy", "-R", ".nv_fatbin", "-R", ".nvFatBinSegment", native, emptied]
    subprocess.run(argv, check=True, capture_output=True)
    code, report = symbols(emptied)
    assert code == 5 and "target 12.1 is missing (machine code: none)" in report["errors"]


def test_a_library_of_somebody_else_fails_for_its_manifest(tmp_path: Path, symbols: Symbols) -> None:
    (tmp_path / "x.c").write_text("int exl3_abi_version(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "x.c", "-o", tmp_path / "x.so"], check=True)
    code, report = symbols(tmp_path / "x.so", "--targets", "12.1")
    assert code == 5 and any(error.startswith("no section exl3.manifest") for error in report["errors"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rates", "3"), "3-bit kernels are not compiled in (rates: 4, 2.5)"),
        (("--codebooks", "mul1"), "codebook mul1 is not compiled in (codebooks: mcg)"),
    ],
)
def test_what_was_not_compiled_in_is_named(native: Path, symbols: Symbols, words: tuple[str, ...], said: str) -> None:
    code, report = symbols(native, *words)
    assert code == 5 and said in report["errors"]


def test_a_measurement_build_is_refused(workshop: Workshop, tmp_path: Path, symbols: Symbols) -> None:
    workshop.build(tmp_path / "x.so", workshop.request(defines=("EXL3_MMA_REPEAT=3",)))
    code, report = symbols(tmp_path / "x.so")
    assert code == 5 and "built for measuring only, with EXL3_MMA_REPEAT=3" in report["errors"][0]


def test_another_abi_is_refused(workshop: Workshop, edited: Edited, tmp_path: Path, symbols: Symbols) -> None:
    source = edited({"abi.h": ("EXL3_ABI_VERSION 1", "EXL3_ABI_VERSION 9")})
    workshop.build(tmp_path / "x.so", workshop.request(source))
    code, report = symbols(tmp_path / "x.so")
    assert code == 5 and report["errors"] == [f"ABI version 9, this package calls {check.ABI}"]


def test_the_package_and_the_kernels_agree_on_the_abi() -> None:
    wrapper = (REPO / "overlay/exl3_vllm/kernels.py").read_text()
    assert f"ABI_VERSION = {check.ABI}\n" in wrapper
    assert link.abi_number(REPO / "overlay/csrc") == check.ABI


def test_every_function_of_the_c_interface_is_required_and_no_other() -> None:
    header = (REPO / "overlay/csrc/abi.h").read_text()
    declared = set(re.findall(r"^EXL3_API .*?(exl3_\w+)\(", header, re.MULTILINE))
    assert set(check.REQUIRED["auto"]) == declared | {"exl3_manifest"}


def test_every_tier_needs_what_the_lower_ones_need() -> None:
    order = ("none", "legacy", "sorted", "batched", "kernel", "grouped")
    for lower, higher in itertools.pairwise(order):
        assert set(check.REQUIRED[lower]) <= set(check.REQUIRED[higher])
    assert check.REQUIRED["auto"] == check.REQUIRED["grouped"]


@pytest.mark.parametrize("content", [b"", b"hello", b"\x7fELF\x02\x01\x01" + b"\0" * 30, b"\x7fELF\x01\x01"])
def test_what_is_no_library_is_refused_without_a_traceback(tmp_path: Path, symbols: Symbols, content: bytes) -> None:
    (tmp_path / "x.so").write_bytes(content)
    code, report = symbols(tmp_path / "x.so")
    assert code == 2 and report["said"].startswith("exl3_vllm.symbols: ") and "Traceback" not in report["said"]


def test_ptx_of_an_older_family_does_not_serve_a_target() -> None:
    code = fatbin.GpuCode({}, frozenset({"9.0", "12.0"}))
    assert check.usable_ptx(code, "12.1") == "12.0"
    assert check.usable_ptx(fatbin.GpuCode({}, frozenset({"9.0"})), "12.1") is None
    assert check.usable_ptx(fatbin.GpuCode({}, frozenset({"12.1"})), "12.0") is None
