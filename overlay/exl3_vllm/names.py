"""From the names of vLLM's layers to the names of the checkpoint's matrices.

vLLM fuses matrices that a checkpoint stores apart. The table is our own: `packed_modules_mapping` of the models is
incomplete (Qwen3-MoE leaves out gate_up_proj unless some layers are dense).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from exl3_vllm.errors import LayoutError

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
}


def _inner(name: str) -> str:
    """The name in a model that is the text part alone: vLLM's draft models have no mapper to tell."""
    outer = "model.language_model."
    return f"model.{name.removeprefix(outer)}" if name.startswith(outer) else name


class ModuleNames:
    """The modules of a checkpoint under the names that vLLM's model uses.

    `matrices` are the modules stored as a trellis, `plain` the modules with a `.weight`.
    """

    def __init__(self, matrices: Iterable[str], plain: Iterable[str]) -> None:
        self._matrices = {alias: name for name in matrices for alias in (_inner(name), name)}
        self._plain = {alias for name in plain for alias in (_inner(name), name)}

    def rename(self, rename: Callable[[str], str | None]) -> None:
        """Apply a model's renaming of modules (vLLM's `hf_to_vllm_mapper` without its fusions)."""
        self._matrices = {rename(name) or name: stored for name, stored in self._matrices.items()}
        self._plain = {rename(name) or name for name in self._plain}

    def candidates(self, prefix: str, packed: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
        """The sets of module names that may make up the layer `prefix`, most direct first."""
        parent, dot, leaf = prefix.rpartition(".")
        options: list[tuple[str, ...]] = [(prefix,)]
        for parts in (FUSED.get(leaf), packed.get(leaf)):
            names = tuple(f"{parent}{dot}{part}" for part in parts or ())
            if names and names not in options:
                options.append(names)
        return options

    def matrices_of(self, prefix: str, packed: Mapping[str, Iterable[str]]) -> tuple[list[str], list[str]]:
        """(stored names of the trellis matrices, names of the plain weights) that make up the layer `prefix`.

        Raises
        ------
        LayoutError: the layer fuses several modules and the checkpoint lacks one; the message names it.
        """
        for names in self.candidates(prefix, packed):
            trellis = [self._matrices[name] for name in names if name in self._matrices]
            plain = [name for name in names if name in self._plain]
            lost = [name for name in names if name not in self._matrices and name not in self._plain]
            if trellis and lost:
                what = f"is part of the layer {prefix}, and the checkpoint holds neither a trellis nor a weight for it"
                raise LayoutError(f"matrix {lost[0]}", what, "Fetch the missing shard or index again")
            if trellis or plain:
                return trellis, plain
        return [], []

    def plain_sections(self, prefix: str, packed: Mapping[str, Iterable[str]]) -> dict[int, str]:
        """The sections of the fused layer `prefix` that are stored plain, by number, with their names."""
        for names in self.candidates(prefix, packed):
            if any(name in self._matrices for name in names):
                return {number: name for number, name in enumerate(names) if name in self._plain}
        return {}

    def any_below(self, prefix: str) -> bool:
        """Whether a trellis matrix lies at or below the module that vLLM calls `prefix`."""
        return any(f"{name}.".startswith(f"{prefix}.") for name in self._matrices)

    def stored(self, name: str) -> str | None:
        """The checkpoint's name of the trellis matrix that vLLM calls `name`, or None."""
        return self._matrices.get(name)
