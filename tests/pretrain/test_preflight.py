"""What is checked before a device is taken."""

from __future__ import annotations

import contextlib

import pytest

from pretrain import preflight
from pretrain.common.errors import UserError
from pretrain.config import load_config


@pytest.mark.parametrize(
    "words, processes, problem",
    [
        ("SOLVER.IMS_PER_BATCH 48", 1, ""),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 4, ""),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 3, "BN_GROUPS is 4; it must be a multiple of 3 processes"),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 2 SOLVER.ACCUMULATE 4", 1, "multiple of 1 process x SOLVER.ACCUM"),
        ("SOLVER.IMS_PER_BATCH 3", 4, "IMS_PER_BATCH is 3, fewer images than the 4 processes"),
    ],
)
def test_a_batch_that_cannot_be_divided(words: str, processes: int, problem: str) -> None:
    cfg = load_config(None, words.split())
    with pytest.raises(UserError, match=problem) if problem else contextlib.nullcontext():
        preflight.refuse_indivisible(cfg, processes)
