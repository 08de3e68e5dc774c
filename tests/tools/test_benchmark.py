"""The command line of the benchmarks refuses what cannot be measured."""

from __future__ import annotations

import pytest

from pretrain.common.errors import UserError
from tools import benchmark


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objectives", "--negatives", "0"], "--negatives is 0; it must be at least 1"),
        (["detection", "--config-file", "x.yaml", "--rounds", "-1"], "--rounds is -1; it must be at least 1"),
    ],
)
def test_a_number_below_1_is_refused(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        benchmark.main(words)
