"""MoCo's loss is compared with the naive form of Eq. (1), and with its limits."""

import torch

from benchmarks import naive
from pretrain.methods.moco import moco
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, assert_same_loss, drawn, queue_case


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_equation_1(seed: int, temperature: float):
    assert_same_loss(moco, naive.moco, queue_case(seed), temperature=temperature)


def test_metrics():
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]).requires_grad_()
    keys = torch.tensor([[[1.0, 0.0], [0.8, 0.6], [0.8, 0.6], [0.0, 1.0]]])
    queue = torch.tensor([[0.6, 0.0], [0.8, 1.0]])  # q.n: (0.6, 0), (0.8, 1), (0.6, 0), (-0.6, 0)
    result = moco(q, keys, queue, temperature=0.5)
    # q.k is 1, 0.6, 0.8, 0: above all negatives for the first and third; a tie does not count
    torch.testing.assert_close(result.metrics["queue_accuracy"], torch.tensor(50.0))
    torch.testing.assert_close(result.metrics["positive_similarity"], torch.tensor(0.6))
