"""What is checked before a device is taken: how a batch is divided among processes, micro-batches and BN groups."""

from __future__ import annotations

import pytest

from pretrain import preflight
from pretrain.common.batch_split import local_bn_groups
from pretrain.config import load_config
from tests.errors import refused


@pytest.mark.parametrize(
    ("words", "processes", "names"),
    [
        ("SOLVER.IMS_PER_BATCH 48", 1, ()),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 4, ()),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 3, ("BN_GROUPS is 4", "3 processes")),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 99", 1, ("BN_GROUPS is 99", "at most 8")),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 2 SOLVER.ACCUMULATE 4", 1, ("1 process x SOLVER.ACCUMULATE 4",)),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 1 SOLVER.ACCUMULATE 2", 2, ("BN_GROUPS is 1", "ACCUMULATE 2")),
        ("SOLVER.IMS_PER_BATCH 3", 4, ("IMS_PER_BATCH is 3", "4 processes")),
        ("SOLVER.IMS_PER_BATCH 8 SOLVER.ACCUMULATE 8", 2, ("2 processes x SOLVER.ACCUMULATE 8",)),
    ],
)
def test_a_batch_that_cannot_be_divided(words: str, processes: int, names: tuple[str, ...]) -> None:
    cfg = load_config(None, words.split())
    if names:
        refused(lambda: preflight.refuse_indivisible(cfg, processes), *names)
    else:
        preflight.refuse_indivisible(cfg, processes)


def test_a_single_process_splits_bn_and_says_so():
    lines: list[str] = []
    assert local_bn_groups(256, 0, True, lines.append) == [32] * 8
    assert "split BN with 8 groups stands in for ShuffleBN" in lines[0]
    for accumulate, groups in ((2, 8), (4, 8), (5, 10), (16, 16)):  # never fewer than without micro-batches
        assert len(local_bn_groups(256, 0, True, lines.append, accumulate)) == groups
    assert local_bn_groups(1, 0, True, lines.append) == [1]


def test_statistics_that_query_and_keys_share_are_said_to_leak():
    lines: list[str] = []
    local_bn_groups(8, 1, True, lines.append, ranks=4)
    local_bn_groups(8, 1, False, lines.append, ranks=4)  # nothing to leak within the batch
    assert len(lines) == 1 and "leak" in lines[0]
