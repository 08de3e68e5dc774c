"""The vanilla multi-key loss is compared with the naive form of Eq. (2)-(3)."""

import torch

from benchmarks import naive
from pretrain.methods.multikey import multikey
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, assert_same_loss, drawn, queue_case


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_equation_3(seed: int, temperature: float):
    assert_same_loss(multikey, naive.multikey, queue_case(seed, keys=3), temperature=temperature)


def test_metrics():
    q = torch.tensor([[1.0, 0.0]]).requires_grad_()
    keys = torch.tensor([[[0.8, 0.6]], [[0.0, 1.0]]])
    queue = torch.tensor([[0.6, -1.0], [0.8, 0.0]])
    result = multikey(q, keys, queue, temperature=0.2)
    torch.testing.assert_close(result.metrics["queue_accuracy"], torch.tensor(50.0))  # 0.8 > 0.6 > 0
    torch.testing.assert_close(result.metrics["positive_similarity"], torch.tensor(0.4))
    torch.testing.assert_close(result.metrics["positive_variance"], torch.tensor((0.16 + 0.04) / 2))
