"""The quantisation "exl3" as vLLM sees it: which layers are trellis matrices, and which method serves each."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_world_group,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from exl3_vllm import receipt
from exl3_vllm.diagnostics import DIAGNOSTICS, Facts
from exl3_vllm.errors import CheckpointError, LayoutError, TierError
from exl3_vllm.experts import Plan
from exl3_vllm.format import Checkpoint
from exl3_vllm.linear import Exl3LinearMethod, unseen_width
from exl3_vllm.loading import ModelLoading
from exl3_vllm.moe import Exl3MoEMethod, experts_of
from exl3_vllm.names import ModuleNames
from exl3_vllm.refusals import told
from exl3_vllm.settings import TIER, Settings
from exl3_vllm.tiers import Resolution, decide

logger = init_logger("vllm.exl3")

RECEIPT_DIR = "EXL3_RECEIPT_DIR"


def checkpoint_directory(model: str, revision: str | None) -> Path:
    """The directory of a model given as a path or as a repository on the hub (fetched into the hub's own cache)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors", "*.json"]))


@register_quantization_config("exl3")
class Exl3Config(QuantizationConfig):
    """EXL3, decided per tensor. `config.json` contributes nothing but its remark on demo models.

    Raises
    ------
    SettingError: an environment variable of the overlay is not understood.
    TierError: the recipe asks for the unquantised control (`tier: none`) and this checkpoint is quantised.
    """

    def __init__(self, demo: str | None) -> None:
        super().__init__()
        self.demo = demo
        self.settings = Settings.from_environ(os.environ)
        if self.settings.asked == "none":
            next_step = "Serve `python -m exl3_vllm.export CHECKPOINT TARGET` instead, or ask for another tier"
            raise TierError(f"{TIER}=none", "is the unquantised control, and this checkpoint is EXL3", next_step)
        self.names: ModuleNames | None = None
        self.loading: ModelLoading | None = None

    def get_name(self) -> str:
        return "exl3"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        with told():
            return cls(config.get("demo"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take a checkpoint whose tensors are EXL3 whatever its config.json calls them ("modelopt" has been seen)."""
        directory = Path(getattr(hf_config, "_name_or_path", "") or "")
        if hf_quant_cfg.get("quant_method") == "exl3" or not directory.name or not directory.is_dir():
            return None
        try:
            found = bool(Checkpoint.open(directory).matrices)
        except CheckpointError:
            return None
        return "exl3" if found else None

    @told()
    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the headers of all shards.

        Raises
        ------
        CheckpointError: damaged files, or none of their tensors is a trellis.
        LayoutError: an embedding or a tied head stored as a trellis.
        """
        checkpoint = Checkpoint.open(checkpoint_directory(model_name, revision))
        if not checkpoint.matrices:
            next_step = "Serve it without the exl3 quantisation"
            raise CheckpointError(str(checkpoint.directory), "holds no trellis tensor", next_step)
        if current_platform.is_cuda():
            from exl3_vllm import gpu

            gpu.require_kernels(checkpoint.matrices.values())
        text = getattr(hf_config, "text_config", None) or hf_config
        _refuse_embeddings(checkpoint, tied=getattr(text, "tie_word_embeddings", False))
        plain = [name.removesuffix(".weight") for name in checkpoint.plain if name.endswith(".weight")]
        self.names = ModuleNames(checkpoint.matrices, plain)
        self.loading = ModelLoading(checkpoint, self.settings, on_complete=self._complete)
        # vLLM loads a checkpoint's own draft layers as a second model, of a class of its own, from the same files.
        self.loading.draft = any("MTP" in name for name in getattr(hf_config, "architectures", None) or ())
        rule = _not_the_drafts if self.loading.draft else _not_ours
        self.loading.ignored_layers = partial(rule, getattr(text, "num_hidden_layers", None))
        self.loading.head_elsewhere = _on_an_earlier_stage

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.names is not None:
            self.names.rename(hf_to_vllm_mapper.map_name)

    def holds_matrix(self, prefix: str) -> bool:
        """Whether the checkpoint holds the layer `prefix` as one trellis matrix."""
        return self._names().stored(prefix) is not None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer, decided by which tensors the checkpoint holds for it.

        Raises
        ------
        LayoutError: the checkpoint holds nothing, or a mixture, for the layer.
        """
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding)):
            return None
        matrices, plain = self._names().matrices_of(prefix, self.packed_modules_mapping)
        if matrices:
            self._meet_gpu()
        if matrices and isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            raise LayoutError(f"layer {prefix}", "is an embedding stored as a trellis", "Store embeddings as fp16")
        if not matrices:
            return self._unquantised(layer, prefix, plain)
        loading = self._loading()
        found = [loading.checkpoint.matrices[name] for name in matrices]
        loading.announce(prefix, found)
        apart = self._names().plain_sections(prefix, self.packed_modules_mapping) if plain else {}
        return Exl3LinearMethod(prefix, found, loading, unseen_width(layer, prefix, self._names()), apart)

    def _unquantised(self, layer: torch.nn.Module, prefix: str, plain: list[str]) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        if not plain:
            what = "is in the model, and the checkpoint holds neither a trellis nor a weight for it"
            raise LayoutError(f"layer {prefix}", what, "Check that config.json belongs to this checkpoint")
        return UnquantizedLinearMethod()

    def _experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        matrices = experts_of(layer, prefix, self._names(), self._loading().checkpoint)
        if not matrices:
            return None
        self._meet_gpu()
        self._loading().announce(prefix, matrices.values())
        return Exl3MoEMethod(prefix, layer, matrices, self._loading())

    def _meet_gpu(self) -> None:
        """Before the first layer is built: what this start asks of a GPU."""
        loading = self._loading()
        if loading.limits is None and current_platform.is_cuda():
            from exl3_vllm import gpu

            loading.limits = gpu.Limits.of(get_current_vllm_config())
            gpu.begin(self.settings.graph_decode, loading.limits)

    def _names(self) -> ModuleNames:
        assert self.names is not None, "vLLM calls maybe_update_config before it builds the model"
        return self.names

    def _loading(self) -> ModelLoading:
        assert self.loading is not None, "vLLM calls maybe_update_config before it builds the model"
        return self.loading

    def _complete(self) -> None:
        """All layers are filled: decide the tier once for all of them, and give the account of this rank."""
        loading, settings = self._loading(), self.settings
        facts = Facts(
            moe_layers=len(loading.shared_suh),
            shared_suh_layers=sum(loading.shared_suh.values()),
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=get_tensor_model_parallel_world_size(),
            stamp=os.environ.get("EXL3_STAMP"),
            rank=get_world_group().rank,
            generation=os.environ.get("EXL3_GENERATION"),
        )
        if current_platform.is_cuda():
            from exl3_vllm import gpu

            gpu.describe(facts)
        shared = bool(loading.shared_suh) and all(loading.shared_suh.values())
        if loading.shared_suh:
            # Legacy is what nothing asked for comes to, and no kernel runs it: there, nothing asked for is auto.
            asked = settings.asked or ("auto" if current_platform.is_cuda() else None)
            resolution = decide(asked, settings.flagged, shared, facts.symbols)
            if current_platform.is_cuda():
                gpu.require_runnable(resolution, settings.cap, loading)
        elif settings.asked in (None, "auto"):
            resolution = Resolution(settings.flagged, "legacy", "no_moe_layers")
        else:
            what = "was asked for by name, and this model has no routed experts"
            raise TierError(f"tier {settings.asked}", what, "Ask for auto")
        loading.plan = Plan(resolution, settings.cap, settings.row_tile)
        if current_platform.is_cuda():
            gpu.finish()
        if loading.draft:
            return  # account and receipt stay those of the target, which was loaded before
        facts.resolution = resolution
        DIAGNOSTICS.facts = facts
        report = receipt.load_report(loading, DIAGNOSTICS.facts.rank, self.demo)
        if current_platform.is_cuda():
            report |= gpu.account(loading)
        logger.info(
            "EXL3 rank %d: %d trellis matrices in %d layers, %d bytes here, rates %s, codebooks %s; tier %s (%s)",
            *(report["rank"], report["trellis_tensors"], report["layers"], report["trellis_bytes"]),
            *(report["rates"], report["codebooks"], resolution.tier, resolution.reason),
        )
        directory = os.environ.get(RECEIPT_DIR)
        if directory:
            receipt.keep_writing(report, DIAGNOSTICS.report, Path(directory))


def _refuse_embeddings(checkpoint: Checkpoint, tied: bool) -> None:
    """A tied head is the embedding, stored plain; vLLM would look for nothing else, and look up rows of nothing else.

    Raises
    ------
    LayoutError: an embedding stored as a trellis, or a head of its own where head and embedding are one.
    """
    for name in checkpoint.matrices:
        if name.rpartition(".")[2] == "embed_tokens":
            raise LayoutError(f"matrix {name}", "is an embedding stored as a trellis", "Store embeddings as fp16")
    if tied and "lm_head" in checkpoint.matrices:
        what = "is a matrix of its own, and config.json says tie_word_embeddings, so vLLM would not load it"
        raise LayoutError("matrix lm_head", what, "Set tie_word_embeddings to false in config.json")


def _not_the_drafts(layers: int | None, layer: int) -> bool:
    """Whether the numbered layer is one of the target's."""
    return layers is not None and layer < layers


def _on_an_earlier_stage() -> bool:
    """Whether another pipeline stage holds the head. A named function: vLLM pickles its configuration to workers."""
    return not get_pp_group().is_last_rank


def _not_ours(layers: int | None, layer: int) -> bool:
    """Whether this rank leaves out the numbered layer: a draft layer past the model's own, or another stage's."""
    if layers is None:
        return False
    from vllm.distributed.utils import get_pp_indices

    stage = get_pp_group()
    first, last = get_pp_indices(layers, stage.rank_in_group, stage.world_size)
    return not first <= layer < last
