"""Compiles the encoders by torch.compile, and starts the processes that generate their kernels."""

import os

from torch import nn

from ..common.interrupt import block_signals
from ..common.ranks.environment import count_cores_per_process

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def compile_encoders(model: nn.Module) -> None:
    """Compile the encoders among a model's children in place, at their first forward pass."""
    start_workers()
    for name, child in model.named_children():
        if name.startswith("encoder"):
            child.compile()


def start_workers() -> None:
    """Start the processes in which torch compiles: at most one per core of this process, or as many as the user chose.

    Torch would start them at the first compilation: for every rank as many as the machine has cores, up to 32, and a
    signal to all processes of the job, which asks the ranks for a checkpoint, would end them.
    """
    from torch._inductor import async_compile, config  # slow to import: only where a run compiles

    if _THREADS not in os.environ:
        cores = count_cores_per_process()
        config.compile_threads = min(config.compile_threads or cores, cores)
    with block_signals():
        async_compile.maybe_warm_pool()
