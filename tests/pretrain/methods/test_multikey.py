"""The vanilla multi-key loss is compared with a loop over Eq. (2)-(3)."""

import math

import torch

from pretrain.methods.multikey import multikey
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, QueueCase, drawn, queue_case


def oracle(case: QueueCase, temperature: float) -> float:
    total = 0.0
    for i, q in enumerate(case.q_ND):
        for keys_ND in case.keys_MND:
            positive = math.exp(float(q.detach() @ keys_ND[i]) / temperature)
            negative = sum(math.exp(float(q.detach() @ n) / temperature) for n in case.queue_DK.T)
            total -= math.log(positive / (positive + negative)) / len(case.keys_MND)
    return total / len(case.q_ND)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_equation_3(seed: int, temperature: float):
    case = queue_case(seed, keys=3)
    assert math.isclose(multikey(*case, temperature=temperature).loss.item(), oracle(case, temperature), rel_tol=1e-10)


def test_metrics():
    q = torch.tensor([[1.0, 0.0]]).requires_grad_()
    keys = torch.tensor([[[0.8, 0.6]], [[0.0, 1.0]]])
    queue = torch.tensor([[0.6, -1.0], [0.8, 0.0]])
    result = multikey(q, keys, queue, temperature=0.2)
    torch.testing.assert_close(result.metrics["queue_accuracy"], torch.tensor(50.0))  # 0.8 > 0.6 > 0
    torch.testing.assert_close(result.metrics["positive_similarity"], torch.tensor(0.4))
    torch.testing.assert_close(result.metrics["positive_variance"], torch.tensor((0.16 + 0.04) / 2))
