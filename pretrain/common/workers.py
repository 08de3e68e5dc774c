"""The DataLoader of every stage: its workers outlive signals meant for the job, and it draws no random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from . import interrupt


class ShieldedDataLoader(DataLoader):
    """torch's, with workers that take SIGTERM from their parent only and no other request to stop.

    A preemption signals every process of a job. The stage must end its step and write a checkpoint, for which it needs
    its workers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        super().__init__(*args, **{**defaults, **kwargs})

    def __iter__(self) -> Any:
        with interrupt.held_back():  # until the new workers ignore them
            return super().__iter__()
