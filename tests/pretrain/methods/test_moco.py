"""MoCo's loss is compared with a loop over Eq. (1), and with its limits."""

import math

import torch

from pretrain.methods.moco import moco
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, drawn, queue_case
from tests.pretrain.methods.test_multikey import oracle


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_equation_1(seed: int, temperature: float):
    case = queue_case(seed)
    assert math.isclose(moco(*case, temperature=temperature).loss.item(), oracle(case, temperature), rel_tol=1e-10)


def test_metrics():
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]).requires_grad_()
    keys = torch.tensor([[[1.0, 0.0], [0.8, 0.6], [0.8, 0.6], [0.0, 1.0]]])
    queue = torch.tensor([[0.6, 0.0], [0.8, 1.0]])  # q.n: (0.6, 0), (0.8, 1), (0.6, 0), (-0.6, 0)
    result = moco(q, keys, queue, temperature=0.5)
    # q.k is 1, 0.6, 0.8, 0: above all negatives for the first and third; a tie does not count
    torch.testing.assert_close(result.metrics["queue_accuracy"], torch.tensor(50.0))
    torch.testing.assert_close(result.metrics["positive_similarity"], torch.tensor(0.6))
