"""The opaque operator under torch.compile: one graph, rows decided at run time."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from exl3_vllm import dense_ops

COMPILED = """
import torch
from exl3_vllm import dense_ops
from torch.nn import functional

for bias in (None, torch.randn(24)):
    weight, graphs = torch.randn(24, 16), []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=keep, fullgraph=True, dynamic=True)
    def layer(x):
        return torch.ops.exl3.dense_linear(x, weight, bias) * 2

    for rows in (2, 7, 300):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(layer(x), functional.linear(x, weight, bias) * 2)
    operators = [node for node in graphs[0].graph.nodes if "dense_linear" in str(node.target)]
    print(len(graphs), len(operators))
    torch._dynamo.reset()
"""


def test_one_compiled_graph_serves_every_number_of_rows() -> None:
    # given a process in which torch.compile is on (in this one it is off, as in the image)
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    # when a function around the operator is called with 2, 7 and 300 rows, without and with a bias
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # then each made one graph, in which the operator is a single node
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1", "1"] * 2


def test_the_operator_passes_torchs_own_checks() -> None:
    x, weight, bias = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    torch.library.opcheck(dense_ops.dense_linear, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
