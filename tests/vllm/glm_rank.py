"""One rank of GLM-5.3-Flash on vLLM 0.33.0's own classes, patched, on a CPU; started by test_glm.py.

`python glm_rank.py RANK SIZE PORT MODEL OUT`: builds and loads the model as a worker does, and writes to OUT what each
EXL3 layer holds, what its feed-forward parts compute, and the errors of what does not run on a CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

TOKENS = 24


def configuration(model: str, size: int, *, sparse: bool) -> Any:
    """vLLM's configuration of the model; unless `sparse`, MLA layers have no indexer, which no CPU backend takes."""
    from vllm.engine.arg_utils import EngineArgs

    def dense(config: Any) -> Any:
        if not sparse:
            config.__dict__["index_topk"] = None
        return config

    arguments = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        max_model_len=256,
        hf_overrides=dense,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,  # which vLLM turns off for MLA on a CPU, too late for its own checks
    )
    return arguments.create_engine_config()


def holdings(model: torch.nn.Module) -> dict[str, Any]:
    """For every EXL3 layer of the rank: its weight and the ranges of the whole matrix that it is of."""
    from exl3_vllm.linear import Exl3LinearMethod, input_range, output_ranges
    from exl3_vllm.moe import Exl3MoEMethod

    held: dict[str, Any] = {}
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Exl3LinearMethod):
            held[name] = (layer.weight.data, output_ranges(layer), input_range(layer))
        elif isinstance(method, Exl3MoEMethod):
            held[name] = (layer.w13_weight.data, layer.w2_weight.data)
    return held


def said(work: Callable[[], Any]) -> str:
    """The error that something ends with, in one line."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "runs"


def linear_attention() -> None:
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda

    row = torch.zeros(1, 1, 2, 128)
    fused_recurrent_kda(q=row, k=row, v=row, g=row, beta=torch.zeros(1, 1, 2))


def main() -> None:
    rank, size, port, folder, out = sys.argv[1:]
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    os.environ.update(GLOO_SOCKET_IFNAME="lo", VLLM_HOST_IP="127.0.0.1", VLLM_DIST_IDENT=f"glm{port}")
    import no_vision

    no_vision.install()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.accelerator.empty_cache = lambda: None  # the wheel for GPUs takes an accelerator for granted
    config = configuration(folder, int(size), sparse=False)
    errors = {}
    with set_current_vllm_config(config):
        init_distributed_environment(int(size), int(rank), "env://", int(rank), "gloo")
        initialize_model_parallel(int(size))
        model = get_model(vllm_config=config)
    x = torch.randn(TOKENS, config.model_config.hf_text_config.hidden_size, generator=torch.Generator().manual_seed(3))
    computed = {}
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config, num_tokens=TOKENS):
        for number, layer in enumerate(model.model.layers):
            computed[number] = layer.mlp(x.clone())
    errors["KDA"] = said(linear_attention)
    if size == "1":
        sparse = configuration(f"{folder}-sparse", 1, sparse=True)
        with set_current_vllm_config(sparse):
            errors["sparse MLA"] = said(lambda: get_model(vllm_config=sparse))
    torch.save({"held": holdings(model), "computed": computed, "x": x, "errors": errors}, out)


if __name__ == "__main__":
    main()
