"""The stream of training images and its batches, tested without Detectron2."""

import itertools

from transfer.training import samplers


def test_every_image_is_seen_once_per_pass_by_one_of_the_processes():
    batches = [samplers.index_batches([1.0] * 12, None, 2, 5, rank, 3, 0) for rank in range(3)]
    first = [list(itertools.islice(b, 2)) for b in batches]
    assert sorted(i for part in first for batch in part for _, i in batch) == list(range(12))
    assert sorted(p for part in first for batch in part for p, _ in batch) == list(range(12))


def test_seeds_of_neighboring_steps_and_ranks_differ():
    seeds = {samplers.derive_seed(s, i, r) for s in range(5) for i in range(200) for r in range(8)}
    assert len(seeds) == 5 * 200 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
