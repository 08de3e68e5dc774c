import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.model.queue import NegativeQueue


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 12), batches=st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_equals_a_naive_fifo_for_any_size_and_batch(size, batches):
    queue = NegativeQueue(2, size)
    naive = list(queue.queue.T)  # slot by slot; the oldest is at ptr
    ptr = 0
    value = 0.0
    for count in batches:
        vectors = torch.arange(value, value + count).repeat(2, 1).T
        value += count
        queue.enqueue(vectors)
        for vector in vectors:
            naive[ptr] = vector
            ptr = (ptr + 1) % size
    assert torch.equal(queue.queue, torch.stack(naive, dim=1))
    assert queue.queue_ptr.item() == ptr


def test_the_queue_is_initialized_with_unit_vectors():
    assert NegativeQueue(8, 5).queue.norm(dim=0) == pytest.approx(torch.ones(5), abs=1e-6)
