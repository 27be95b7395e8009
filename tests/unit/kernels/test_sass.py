"""Counting what a weight costs: in a small disassembly by hand, and in every kernel of the shipped headline library."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import compiler
import pytest
import units
from exl3_vllm import sass
from workshop import REPO, Symbols, Workshop, wheels

CSRC = REPO / "overlay/csrc"

LOOP = """\
		Function : _Z4gemmv
        /*0000*/                   MOV R1, c[0x0][0x28] ;               /* 0x0 */
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;     /* 0x0 */
        /*0020*/                   LDS.128 R8, [R2] ;                   /* 0x0 */
        /*0030*/                   IMAD R9, R8, -0x3453e013, RZ ;       /* 0x0 */
        /*0040*/              @P0  IMAD R3, R8, 0x2800, R2 ;            /* 0x0 */
        /*0050*/                   LOP3.LUT R9, R9, 0x8fff8fff, R7, 0x6a, !PT ;
        /*0060*/                   HADD2 R9, R9.H0_H0, R9.H1_H1 ;       /* 0x0 */
        /*0070*/                   IMAD.MOV.U32 R5, RZ, RZ, R9 ;        /* 0x0 */
        /*0080*/                   HMMA.16816.F32 R4, R8, R12, R4 ;     /* 0x0 */
        /*0090*/             @!P1  BRA 0x20 ;                           /* 0x0 */
        /*00a0*/                   IADD3 R3, R3, 0x1, RZ ;              /* 0x0 */
        /*00b0*/              @P2  BRA 0x10 ;                           /* 0x0 */
        /*00c0*/                   EXIT ;                               /* 0x0 */
"""


def test_the_innermost_tensor_loop_is_found_and_its_weights_are_the_multiplications() -> None:
    ((name, body),) = sass.kernels(LOOP)
    assert name == "_Z4gemmv" and len(body) == 13
    (loop,) = sass.pipeline_loops(body)
    cost = sass.cost(loop, "mcg")
    # LDS, the multiplication by the constant, LOP3, HADD2 and the move count; the address's multiplication does not.
    assert (cost.weights, cost.decode, cost.total, cost.tensor) == (1, 5, 8, 1)


def test_a_loop_without_the_codebooks_constant_is_not_taken_for_one_that_decodes() -> None:
    ((_, body),) = sass.kernels(LOOP)
    with pytest.raises(ValueError, match="constant of mul1"):
        sass.cost(sass.pipeline_loops(body)[0], "mul1")


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "ctas"),
    [
        (226, 256, 73728, 1),  # registers: 65536 / (232 x 256)
        (128, 256, 48 * 1024, 2),  # both
        (64, 128, 50 * 1024, 1),  # shared memory: two would need 2 x 51 KB
        (32, 512, 1024, 3),  # threads: 1536 / 512
    ],
)
def test_ctas_per_sm_is_the_tightest_of_three_limits(registers: int, threads: int, shared: int, ctas: int) -> None:
    assert sass.ctas_per_sm("12.1", registers=registers, threads=threads, shared=shared) == ctas


# ---- the shipped kernels -------------------------------------------------------------------------------------------

TILES = re.findall(r"\w+", re.findall(r"enum class Tile : int \{(.*?)\}", (CSRC / "tiles.cuh").read_text())[0])
SHAPES = r"""
#include <cstdio>
#include <utility>
#include "tiles.cuh"
using namespace exl3;
template <Tile T> void show() {
  std::printf("%d %d %d %d\n", int(T), tile_threads(T), ctas_for<T>(8, true), shared_bytes<T>(8, true));
}
template <int... I> void show_all(std::integer_sequence<int, I...>) { (show<Tile(I)>(), ...); }
int main() { show_all(std::make_integer_sequence<int, TILES>()); }
"""


@pytest.fixture(scope="module")
def headline(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped kernels for 4 bits, codebook mcg, both Blackwell targets; objects stay in the user's cache."""
    out = tmp_path_factory.mktemp("headline") / "exl3_kernels.abi3.so"
    lasting = Workshop(workshop.toolchain, wheels.default_cache() / "kernels")
    lasting.build(out, lasting.request(source=CSRC))
    return out


@pytest.fixture(scope="module")
def shapes(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, int, int]]:
    """Tile -> (threads, CTAs per SM that it is meant for, dynamic shared bytes), 4 bits on sm_12x, from tiles.cuh."""
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "shapes.cu").write_text(SHAPES)
    tools = workshop.tools(wheels.build_machine())
    argv = [
        tools.nvcc,
        "-std=c++17",
        f"-DTILES={len(TILES)}",
        f"-I{CSRC}",
        f"-L{tools.tree}/lib",
        folder / "shapes.cu",
        "-o",
        folder / "shapes",
    ]
    subprocess.run(argv, check=True, capture_output=True)
    said = subprocess.run([folder / "shapes"], check=True, capture_output=True, text=True).stdout
    rows = [tuple(map(int, line.split())) for line in said.splitlines()]
    return {row[0]: (row[1], row[2], row[3]) for row in rows}


def trellis_gemms(library: Path, target: str, cuobjdump: Path) -> Iterator[tuple[int, str, list[sass.Instruction]]]:
    for name, body in sass.kernels(sass.disassemble(library, cuobjdump, target)):
        if found := re.search(r"trellis_gemm.*TileE(\d)", name):
            yield int(found[1]), name, body


@pytest.mark.parametrize("target", ["12.0", "12.1"])
def test_a_weight_of_the_headline_costs_at_most_5_3_instructions(
    headline: Path, cuobjdump: Path, shapes: dict[int, tuple[int, int, int]], target: str
) -> None:
    seen = set()
    for tile, name, body in trellis_gemms(headline, target, cuobjdump):
        costs = [sass.cost(loop, "mcg") for loop in sass.pipeline_loops(body)]
        seen.add(tile)
        assert costs, f"no pipeline loop in {name}"
        assert sass.worst(costs).decode_per_weight <= 5.3, f"{TILES[tile]}: {sass.worst(costs)}"
    assert seen == set(shapes)


@pytest.mark.parametrize("target", ["12.0", "12.1"])
def test_every_tile_fits_as_often_on_an_sm_as_it_is_meant_to(
    headline: Path, shapes: dict[int, tuple[int, int, int]], target: str
) -> None:
    content = json.loads(headline.with_name(headline.name + ".json").read_text())
    uses = [use for use in content["resources"] if use["target"] == f"sm_{target.replace('.', '')}"]
    tiles = {int(found[1]): use for use in uses if (found := re.search(r"trellis_gemm.*TileE(\d)", use["kernel"]))}
    assert set(tiles) == set(shapes)
    for tile, use in tiles.items():
        threads, ctas, dynamic = shapes[tile]
        shared = dynamic + use["shared"]
        fit = sass.ctas_per_sm(target, registers=use["registers"], threads=threads, shared=shared)
        assert fit >= ctas, f"{TILES[tile]}: {fit} of {ctas} CTAs fit with {use['registers']} registers, {shared} bytes"


def test_the_headline_library_holds_all_that_every_tier_calls(headline: Path, symbols: Symbols) -> None:
    code, report = symbols(headline, "--targets", "12.0,12.1", "--rates", "4", "--codebooks", "mcg")
    assert (code, report["errors"], report["warnings"]) == (0, [], [])


def test_the_cache_key_does_not_depend_on_where_the_sources_lie(workshop: Workshop, tmp_path: Path) -> None:
    shutil.copytree(CSRC, tmp_path / "elsewhere")
    tools = workshop.tools(wheels.build_machine())
    keys = []
    for source in (CSRC, tmp_path / "elsewhere"):
        jobs = units.expand(units.read_units(source), [4.0], ["mcg"])
        keys.append([compiler.object_key(job, workshop.request(source=source), tools) for job in jobs])
    assert keys[0] == keys[1]


@pytest.mark.full
@pytest.mark.parametrize("host", wheels.MACHINES)
def test_every_rate_and_codebook_builds_without_a_spill(
    workshop: Workshop, tmp_path: Path, symbols: Symbols, host: str
) -> None:
    # About 15 minutes of one core when nothing is cached; a fault of any kernel fails the build itself.
    lasting = Workshop(workshop.toolchain, wheels.default_cache() / "kernels")
    asked = lasting.request(source=CSRC, host=host, rates=units.RATES, codebooks=tuple(units.CODEBOOKS))
    lasting.build(tmp_path / "all.so", asked)
    code, report = symbols(tmp_path / "all.so", "--host", host)
    assert (code, report["errors"], report["warnings"]) == (0, [], [])
    assert report["asked"]["rates"] == list(units.RATES) and len(report["asked"]["codebooks"]) == 3
