"""ReSSL's loss is compared with a loop over its equation."""

import math

from pretrain.methods.ressl import ressl
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, QueueCase, drawn, queue_case


def oracle(case: QueueCase, tau: float, tau_m: float) -> float:
    total = 0.0
    for i, q in enumerate(case.q_ND.detach()):
        p = [math.exp(float(q @ n) / tau) for n in case.queue_DK.T]
        s = [math.exp(float(case.keys_MND[0, i] @ n) / tau_m) for n in case.queue_DK.T]
        total -= sum(s_j / sum(s) * math.log(p_j / sum(p)) for s_j, p_j in zip(s, p, strict=True))
    return total / len(case.q_ND)


@drawn(seed=SEEDS, tau=TEMPERATURES, tau_m=TEMPERATURES)
def test_loss_is_the_equation(seed: int, tau: float, tau_m: float):
    case = queue_case(seed)
    loss = ressl(*case, temperature=tau, key_temperature=tau_m).loss.item()
    assert math.isclose(loss, oracle(case, tau, tau_m), rel_tol=1e-9)
