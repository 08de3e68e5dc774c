"""Entry points of stages whose own `main` takes parsed arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def transfer(argv: Sequence[str]) -> Any:
    """transfer/train_net.py in a process that the launcher started: one a GPU, ranks from the environment."""
    from transfer import train_net

    return train_net.main(train_net.argument_parser().parse_args(argv))
