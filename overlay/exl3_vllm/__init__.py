"""EXL3 for vLLM: an out-of-tree plugin that reads, checks and serves EXL3 checkpoints.

This module imports nothing: vLLM logs and skips a plugin whose module fails to import, but lets an exception of the
entry point itself stop the process. So everything that can fail happens inside `register`.
"""

LOADED = False
"""True once the quantisation "exl3" is registered in this process. Nothing else ever registers that name."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM calls it in every process, possibly more than once.

    Raises whatever keeps the plugin from working: a server that would run without it must not start.
    """
    global LOADED
    if LOADED:
        return
    import exl3_vllm.config  # noqa: F401  (its import registers the quantisation)
    from exl3_vllm.heads import find_quantised_heads
    from exl3_vllm.refusals import tell_refusals
    from exl3_vllm.tracking import track_exl3_loading
    from exl3_vllm.variables import name_variables

    name_variables()
    tell_refusals()
    track_exl3_loading()
    find_quantised_heads()
    LOADED = True
