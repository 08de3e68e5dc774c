"""What a process knows of its place before it joins a process group."""

import os

import pytest

from pretrain.common.ranks.environment import build_rank_environment, is_first_process, is_rank


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_process_knows_whether_it_is_a_rank_and_the_first_one(monkeypatch: pytest.MonkeyPatch, rank: int | None):
    variables = {} if rank is None else build_rank_environment(rank, 4, rank % 2, 2)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank() == (rank is not None)
    assert is_first_process() == (rank != 1)
    if rank is not None:
        assert [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["4", str(rank), "2"]
