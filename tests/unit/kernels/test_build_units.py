"""What a source file says of itself decides how it is compiled, and what is compiled again."""

from __future__ import annotations

from pathlib import Path

import pytest
import units


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_rate_unit_is_compiled_once_per_rate_and_codebook(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm.cu", "// unit: rate codebook\n// ops: exl3_gemm\n")
    unit = units.read_unit(path)
    assert unit is not None and unit.ops == ("exl3_gemm",)

    jobs = units.expand([unit], [2.5, 4.0], ["3inst", "mul1"])

    assert [dict(job.defines) for job in jobs] == [
        {"EXL3_RATE2": "5", "EXL3_CODEBOOK": "0"},
        {"EXL3_RATE2": "5", "EXL3_CODEBOOK": "2"},
        {"EXL3_RATE2": "8", "EXL3_CODEBOOK": "0"},
        {"EXL3_RATE2": "8", "EXL3_CODEBOOK": "2"},
    ]
    assert (jobs[1].rate, jobs[1].codebook) == (2.5, "mul1")


def test_an_axis_of_its_own_splits_a_slow_unit(tmp_path: Path) -> None:
    unit = units.read_unit(write(tmp_path, "moe.cu", "// unit: rate codebook part=1,2\n"))
    assert unit is not None
    jobs = units.expand([unit], [4.0], ["mcg"])
    assert [job.label for job in jobs] == [f"moe.cu EXL3_RATE2=8 EXL3_CODEBOOK=1 EXL3_PART={part}" for part in (1, 2)]


def test_slow_units_start_first(tmp_path: Path) -> None:
    write(tmp_path, "a.cpp", "// unit: once\n")
    write(tmp_path, "z.cu", "// unit: rate codebook\n")
    jobs = units.expand(units.read_units(tmp_path), [4.0], ["mcg"])
    assert [job.unit.name for job in jobs] == ["z.cu", "a.cpp"]


def test_a_file_without_the_line_is_no_unit_and_a_folder_without_units_is_an_error(tmp_path: Path) -> None:
    assert units.read_unit(write(tmp_path, "a.cu", "#include <x>\n")) is None
    with pytest.raises(units.UnitError, match="nothing to build"):
        units.read_units(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("// unit: bits", "a.cu:1: unit axis 'bits'"),
        ("// unit:  ", "names nothing"),
        ("// budget: gemm regs=3", "a.cu:1: budget 'regs=3'"),
        ("// budget: gemm", "at least one limit"),
    ],
)
def test_a_directive_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(units.UnitError, match=said):
        units.read_unit(write(tmp_path, "a.cu", line + "\n// unit: once\n"))


def test_sources_follow_quoted_includes_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "b.cuh", '#pragma once\n#include "c.cuh"\n#include "b.cuh"\n')
    write(tmp_path, "c.cuh", "#include <cuda_runtime.h>\n")
    write(tmp_path, "unused.cuh", "")
    path = write(tmp_path, "a.cu", '#include "b.cuh"\n  #  include "toolkit.h"\n')
    assert {file.name for file in units.sources(path)} == {"a.cu", "b.cuh", "c.cuh"}


def test_the_digest_sees_names_bytes_and_words_but_not_folders(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    here, there = write(tmp_path / "1", "a", "x"), write(tmp_path / "2", "a", "x")
    assert units.digest([here], "w") == units.digest([there], "w")
    assert units.digest([here], "w") != units.digest([here], "v")
    assert units.digest([here]) != units.digest([write(tmp_path / "1", "b", "x")])
