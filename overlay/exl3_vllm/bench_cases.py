"""The measurements behind `python -m exl3_vllm.bench`: one function per bar, each returns plain data.

Times are medians of CUDA-graph replays timed with events, over rotating inputs and weights so that neither fits the L2
cache. Geometry: one layer of the headline model at tensor parallel 2, and three dense layers.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exl3_vllm import bench_peers, decode, kernels, plans
from exl3_vllm.format import BLOCK
from exl3_vllm.kernels import Experts, Matrix

HIDDEN, INTER, EXPERTS, TOPK, LIMIT = 4096, 1024, 288, 8, 10.0
DENSE = ((5120, 17408, 10), (17408, 5120, 12), (5120, 32768, 12))  # K, N, twice the bits; codebook mcg
MCG = 1
Call = Callable[[], Any]


@dataclass
class Bench:
    """The device, the table in use, and weights made once."""

    device: torch.device
    table: plans.Table
    peer: Any | None
    sets: int = 2  # of weights and inputs that take turns
    layers: list[tuple[Experts, list[Matrix]]] = field(default_factory=list)

    def race(self, runners: dict[str, list[Call]], repeats: int = 11) -> dict[str, float]:
        """Median microseconds per call of each runner; they take turns, so that a clock that drifts drifts for all."""
        graphs = {}
        for name, calls in runners.items():
            for call in calls:
                call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for call in calls:
                    call()
            graphs[name].replay()
        times: dict[str, list[float]] = {name: [] for name in runners}
        event: Any = torch.cuda.Event
        for _ in range(repeats):
            for name, graph in graphs.items():
                start, end = event(enable_timing=True), event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / len(runners[name]) * 1e3)
        return {name: statistics.median(values) for name, values in times.items()}

    def timed(self, calls: list[Call]) -> float:
        """Median microseconds per call."""
        return self.race({"": calls})[""]

    def signs(self, n: int, size: float) -> Tensor:
        magnitude = size * (0.75 + 0.5 * torch.rand(n, device=self.device))
        return torch.where(torch.rand(n, device=self.device) < 0.5, -magnitude, magnitude).half()

    def matrices(self, count: int, k: int, n: int, rate2: int, suh: Tensor | None = None) -> list[Matrix]:
        shape = (count, k // 16, n // 16, 8 * rate2)
        bits = torch.randint(-32768, 32768, shape, device=self.device, dtype=torch.int16)
        return [
            Matrix(bits[i], self.signs(k, k**-0.5) if suh is None else suh, self.signs(n, 1.0), "mcg", n)
            for i in range(count)
        ]

    def experts(self, index: int) -> Experts:
        while len(self.layers) <= index:
            suh = self.signs(HIDDEN, HIDDEN**-0.5)
            gate, up = (self.matrices(EXPERTS, HIDDEN, INTER, 8, suh) for _ in range(2))
            down = self.matrices(EXPERTS, INTER, HIDDEN, 8)
            self.layers.append((kernels.experts(gate, up, down), [*gate, *up, *down]))
        return self.layers[index][0]

    def activations(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=torch.float16)

    def routing(self, tokens: int, zipf: bool) -> tuple[Tensor, Tensor]:
        """Distinct experts per token; zipf: the r-th most popular is chosen with probability 1 / r."""
        popularity = (
            1 / torch.arange(1, EXPERTS + 1, device=self.device) if zipf else torch.ones(EXPERTS, device=self.device)
        )
        popularity = popularity.float()[torch.randperm(EXPERTS, device=self.device)]
        ids = torch.multinomial(popularity.expand(tokens, EXPERTS), TOPK).int()
        return ids, torch.rand(tokens, TOPK, device=self.device)


def ceilings(b: Bench) -> dict[str, float]:
    """What this GPU gives at most: a large fp16 product (TFLOP/s) and a device copy (TB/s, read + written)."""
    a, c = b.activations(8192, 8192), b.activations(8192, 8192)
    source = torch.empty(1 << 30, dtype=torch.int32, device=b.device)
    target = torch.empty_like(source)
    product = b.timed([lambda: torch.mm(a, c)])
    copy = b.timed([lambda: target.copy_(source)])
    return {"mm_tflops": 2 * 8192**3 / product / 1e6, "copy_tbs": 2 * 4 * source.numel() / copy / 1e6}


def _layer_calls(b: Bench, inputs: list[tuple[Tensor, Tensor, Tensor]], layers: list[Experts]) -> list[Call]:
    call = functools.partial(kernels.moe, limit=LIMIT, table=b.table)
    return [functools.partial(call, *given, layer) for given, layer in zip(inputs, layers, strict=True)]


def moe_prefill(b: Bench, tokens: int, zipf: bool) -> dict[str, float]:
    """K1, K2: the whole layer and torch._grouped_mm with dense weights, us."""
    inputs = [(b.activations(tokens, HIDDEN), *b.routing(tokens, zipf)) for _ in range(b.sets)]
    layers = [b.experts(i) for i in range(b.sets)]
    own = _layer_calls(b, inputs, layers)
    gate_up = torch.randn(EXPERTS, HIDDEN, 2 * INTER, device=b.device, dtype=torch.bfloat16)
    down = torch.randn(EXPERTS, INTER, HIDDEN, device=b.device, dtype=torch.bfloat16)
    others = [bench_peers.grouped_mm(x, ids, gate_up, down) for x, ids, _ in inputs]
    # The time is taken alone: beside dense bf16 products, which draw far more power, the clock drops by 5 %. The
    # ratio is taken with both under that clock.
    result = {"us": b.timed(own)}
    raced = b.race({"us": own, "grouped_mm_us": others})
    result |= {"grouped_mm_us": raced["grouped_mm_us"], "ratio": raced["us"] / raced["grouped_mm_us"]}
    result["tflops"] = tokens * TOPK * 3 * 2 * HIDDEN * INTER / result["us"] / 1e6
    return result


def moe_decode(b: Bench, counts: Iterable[int]) -> list[dict[str, float]]:
    """K3: the layer at few tokens, and the better of exllamav3's two kernels where installed, us."""
    layers = [b.experts(i) for i in range(b.sets)]
    peers = [bench_peers.MoePeer(b.peer, e, 256, TOPK) for e in layers] if b.peer else []
    results = []
    for tokens in counts:
        inputs = [(b.activations(tokens, HIDDEN), *b.routing(tokens, False)) for _ in range(b.sets)]
        own = _layer_calls(b, inputs, layers)
        runners = {"us": own}
        if peers:
            _check_peer(own[0](), peers[0], inputs[0])
            runners["grouped"] = [p.grouped(*i) for p, i in zip(peers, inputs, strict=True)]
            if tokens <= bench_peers.COOP_TOKENS:
                runners["cooperative"] = [p.cooperative(*i) for p, i in zip(peers, inputs, strict=True)]
        times = b.race(runners)
        result = {"tokens": tokens, "us": times.pop("us")}
        if times:
            result |= {"peer_us": min(times.values()), "ratio": min(times.values()) / result["us"]}
        results.append(result)
    return results


def _check_peer(own: Tensor, peer: bench_peers.MoePeer, given: tuple[Tensor, Tensor, Tensor]) -> None:
    """A comparison of times means something only between equal results."""
    calls = [peer.grouped(*given)]
    if own.shape[0] <= bench_peers.COOP_TOKENS:
        calls.append(peer.cooperative(*given))
    for call in calls:
        difference = _error(call()[: own.shape[0]], own.double())
        if not difference < 3e-3:
            raise RuntimeError(f"exllamav3's result differs from ours by {difference:.1e} at {own.shape[0]} tokens")


def dense(b: Bench, shape: tuple[int, int, int], counts: Iterable[int]) -> list[dict[str, float]]:
    """K4, K5, K6: dispatch, both of its paths, and others' at each number of rows, us.

    Keys: us (what dispatch takes), fused_us, reconstruct_us (ours + torch.mm), mm_us (dense fp16 weight), and with
    exllamav3 peer_us (exl3_gemm) and peer_reconstruct_us.
    """
    k, n, rate2 = shape
    weights = b.matrices(4, k, n, rate2)
    decoded, buffer = b.activations(k, n), torch.empty((k, n), dtype=torch.float16, device=b.device)
    return [_dense_at(b, rows, weights, decoded, buffer) for rows in counts]


def _dense_at(b: Bench, rows: int, weights: list[Matrix], decoded: Tensor, buffer: Tensor) -> dict[str, float]:
    k, n = decoded.shape
    plan = plans.dense_plan(b.table, kernels.gpu_of(b.device), rows, k, (n,))
    out = torch.empty((rows, n), dtype=torch.float16, device=b.device)
    pairs = [(b.activations(rows, k), w) for w in weights]

    def calls(product: Callable[[Tensor, Matrix], Any]) -> list[Call]:
        return [functools.partial(product, x, w) for x, w in pairs]

    runners = {
        "us": calls(lambda x, w: kernels.linear(x, [w], table=b.table, weight=buffer)),
        "fused_us": calls(lambda x, w: kernels.fused_linear(x, [w], False, out, plan)),
        "mm_us": calls(lambda x, w: torch.mm(x, decoded, out=out)),
    }
    if rows >= 32:
        runners["reconstruct_us"] = calls(lambda x, w: kernels.reconstructed_linear(x, [w], out, buffer))
    if b.peer and rows <= 256:
        runners["peer_us"] = [bench_peers.dense_call(b.peer, x, w, out) for x, w in pairs]
    if b.peer and rows >= 64:
        runners["peer_reconstruct_us"] = [bench_peers.reconstruct_call(b.peer, x, w, out, buffer) for x, w in pairs]
    return {"rows": rows, **b.race(runners)}


def crossover(b: Bench, shape: tuple[int, int, int]) -> int:
    """Rows up to which the fused path beats reconstruct + cuBLAS for this layer; 32 at least."""
    last = 32
    for rows in (64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096, 8192):
        result = dense(Bench(b.device, b.table, None), shape, [rows])[0]
        if result["fused_us"] > result["reconstruct_us"]:
            return last
        last = rows
    return last


def _hadamard(x: Tensor) -> Tensor:
    sign = torch.where(decode.hadamard(x.device) > 0, 1.0, -1.0).double()
    return (x.double().reshape(*x.shape[:-1], -1, BLOCK) @ sign).flatten(-2) / BLOCK**0.5


def _weight(m: Matrix) -> Tensor:
    inner = decode.inner_weight(m.trellis, m.codebook).double()
    return _hadamard(_hadamard(inner.T).T * m.suh.double()[:, None]) * m.svh.double()


def _error(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want).norm() / want.norm()).item())


def accuracy(b: Bench) -> dict[str, float]:
    """K7: relative L2 against fp64 products of the independent decoder's weights, worst over the paths of dispatch."""
    worst = 0.0
    for k, n, rate2 in ((1024, 1024, 8), (2048, 512, 10)):
        m = b.matrices(1, k, n, rate2)[0]
        weight = _weight(m)
        for rows in (1, 7, 16, 33, 64, 128, 200, 600, 1100):
            x = b.activations(rows, k)
            for dtype in (torch.float16, torch.float32):
                worst = max(worst, _error(kernels.linear(x, [m], out_dtype=dtype, table=b.table), x.double() @ weight))
    result = {"dense": worst, "moe": 0.0}
    layer, matrices = b.experts(0), b.layers[0][1]
    for tokens in (1, 33, 300):
        x = b.activations(tokens, HIDDEN)
        ids, w = b.routing(tokens, False)
        chosen = torch.unique(ids)[:6].tolist()  # six experts' worth of fp64 is enough; the others' slots are left out
        ids = torch.where(torch.isin(ids, torch.tensor(chosen, device=b.device)), ids, -1).int()
        want = torch.zeros((tokens, HIDDEN), dtype=torch.float64, device=b.device)
        for e in chosen:
            token, slot = torch.where(ids == e)
            gate, up = (x[token].double() @ _weight(matrices[e + i * EXPERTS]) for i in (0, 1))
            hidden = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
            product = hidden @ _weight(matrices[e + 2 * EXPERTS])
            want.index_add_(0, token, product * w[token, slot].double()[:, None])
        got = kernels.moe(x, ids, w, layer, limit=LIMIT, out_dtype=torch.float32, table=b.table)
        result["moe"] = max(result["moe"], _error(got, want))
    return result


def repeatable(b: Bench) -> bool:
    """K8: five runs of every path give the same bits."""
    m = b.matrices(1, 5120, 4096, 10)[0]
    for rows in (1, 24, 100, 500):
        x = b.activations(rows, 5120)
        first = kernels.linear(x, [m], table=b.table)
        if not all(torch.equal(kernels.linear(x, [m], table=b.table), first) for _ in range(4)):
            return False
    for tokens in (1, 60, 2048):
        x = b.activations(tokens, HIDDEN)
        ids, w = b.routing(tokens, True)
        first = kernels.moe(x, ids, w, b.experts(0), limit=LIMIT, table=b.table)
        if not all(
            torch.equal(kernels.moe(x, ids, w, b.experts(0), limit=LIMIT, table=b.table), first) for _ in range(4)
        ):
            return False
    return True


def slow_tensor(b: Bench) -> dict[str, Any]:
    """K9, with a library built with EXL3_MMA_REPEAT=3: gate, up and down of a layer; dense products against the peak.

    The peak is a third of what mma.sync reaches from registers on this GPU (625 TFLOP/s on the H200).
    """
    gpu = kernels.gpu_of(b.device)
    result: dict[str, Any] = {}
    for tokens in (2048, 7168):
        for zipf in (False, True):
            x = b.activations(tokens, HIDDEN)
            ids, w = b.routing(tokens, zipf)
            layer = b.experts(0)
            plan = plans.moe_plan(b.table, gpu, tokens, TOPK, EXPERTS, HIDDEN, INTER, shared_suh=True)
            out = torch.empty_like(x)
            space = torch.empty(kernels.moe_workspace(tokens, TOPK, layer, plan), dtype=torch.uint8, device=b.device)
            kernels.moe_into(x, ids, w, layer, LIMIT, plan, out, space)
            phases = kernels.GATE_UP | kernels.DOWN
            call = lambda: kernels.moe_into(x, ids, w, layer, LIMIT, plan, out, space, phases)  # noqa: B023, E731
            result[f"moe_{tokens}_{'zipf' if zipf else 'uniform'}_us"] = b.timed([call])
    k, n, peak = 5120, 17408, 625e6 / 3
    m = b.matrices(1, k, n, 8)[0]
    for rows in (1024, 4096):
        x, out = b.activations(rows, k), torch.empty((rows, n), dtype=torch.float16, device=b.device)
        chosen = plans.dense_plan(plans.SM12X, gpu, rows, k, (n,))  # by dispatch on the GPUs that this emulates
        us = b.timed([functools.partial(kernels.fused_linear, x, [m], False, out, chosen)])
        result[f"dense_{rows}_of_peak"] = 2 * rows * k * n / us / peak
    return result
