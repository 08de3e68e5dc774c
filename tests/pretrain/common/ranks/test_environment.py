"""What a process knows of its place before it joins a process group."""

import os

import pytest

from pretrain.common.ranks.environment import (
    build_rank_environment,
    count_cores_per_process,
    count_usable_cores,
    is_first_process,
    is_rank,
    read_world_size,
)
from tests.errors import refused


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_process_knows_whether_it_is_a_rank_and_the_first_one(monkeypatch: pytest.MonkeyPatch, rank: int | None):
    variables = {} if rank is None else build_rank_environment(rank, 4, rank % 2, 2)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank() == (rank is not None)
    assert is_first_process() == (rank != 1)
    assert read_world_size() == (1 if rank is None else 4)
    if rank is not None:
        assert [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [str(rank % 2), "2"]


def test_an_empty_number_is_none_and_a_word_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As a script exports it where SLURM has not set its own."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "")
    assert (read_world_size(), read_world_size(0), count_cores_per_process()) == (1, 0, count_usable_cores())
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused(read_world_size, "WORLD_SIZE is 'two'", "unset it")
