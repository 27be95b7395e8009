"""Where a matrix may be cut between ranks."""

from __future__ import annotations

import pytest
from exl3_vllm.cut import Cut, check_columns, check_rows, share_of_blocks
from exl3_vllm.errors import LayoutError
from exl3_vllm.format import TrellisMatrix


def stored(rows: int, columns: int) -> TrellisMatrix:
    return TrellisMatrix("mlp.down_proj", 8, "mcg", rows, columns, "suh", "svh", {})


@pytest.mark.parametrize(
    ("features", "ranks", "rows"),
    [
        (1024, 1, [(0, 1024)]),
        (1024, 2, [(0, 512), (512, 1024)]),
        (512, 4, [(0, 128), (128, 256), (256, 384), (384, 512)]),
        # 2880 inputs are stored as 2944 rows; on one rank the 64 rows of padding come along
        (2880, 1, [(0, 2944)]),
    ],
)
def test_rows_are_cut_at_blocks(features: int, ranks: int, rows: list[tuple[int, int]]) -> None:
    matrix = stored(-(-features // 128) * 128, 256)
    width = features // ranks
    assert [check_rows(matrix, rank * width, (rank + 1) * width, features) for rank in range(ranks)] == rows


@pytest.mark.parametrize(("features", "ranks"), [(1408, 2), (768, 4), (2880, 2), (320, 2)])
def test_a_row_cut_inside_a_block_names_the_geometry(features: int, ranks: int) -> None:
    # given a matrix that tensor parallelism would split inside a Hadamard block (GLM-4.5-Air: 1408 = 5.5 blocks each)
    matrix = stored(-(-features // 128) * 128, 256)
    width = features // ranks
    # when / then some rank refuses, naming matrix, rows and block
    with pytest.raises(LayoutError, match=rf"mlp\.down_proj.*{features} input rows into {width} per rank.*128"):
        for rank in range(ranks):
            check_rows(matrix, rank * width, (rank + 1) * width, features)


def test_columns_may_be_cut_anywhere_and_load_the_blocks_that_cover_them() -> None:
    matrix = stored(256, 1408)
    first, last = check_columns(matrix, 704, 1408, 1408)
    cut = Cut(0, 256, first, last)
    assert cut.covering == (640, 1408)
    assert cut.columns == 704


def test_sizes_of_another_model_are_refused() -> None:
    with pytest.raises(LayoutError, match="stores 1024 rows"):
        check_rows(stored(1024, 256), 0, 512, 512)
    with pytest.raises(LayoutError, match="stores 256 columns"):
        check_columns(stored(1024, 256), 0, 512, 512)


@pytest.mark.parametrize(
    ("features", "ranks", "shares"),
    [
        (1408, 2, [(0, 640), (640, 1408)]),
        (768, 2, [(0, 384), (384, 768)]),
        (768, 4, [(0, 128), (128, 384), (384, 512), (512, 768)]),
        (2880, 2, [(0, 1408), (1408, 2880)]),
    ],
)
def test_blocks_are_shared_as_evenly_as_they_go(features: int, ranks: int, shares: list[tuple[int, int]]) -> None:
    matrix = stored(-(-features // 128) * 128, 256)
    got = [share_of_blocks(matrix, features, rank, ranks) for rank in range(ranks)]
    assert got == shares
    # and every share is a cut that rows allow
    for begin, end in got:
        check_rows(matrix, begin, end, features)


def test_fewer_blocks_than_ranks_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"mlp\.down_proj.*3 blocks of 128, too few for 4 ranks"):
        share_of_blocks(stored(384, 256), 384, 0, 4)
