"""ReSSL's loss is compared with the naive form of its equation."""

from benchmarks import naive
from pretrain.methods.ressl import ressl
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, assert_same_loss, drawn, queue_case


@drawn(seed=SEEDS, tau=TEMPERATURES, tau_m=TEMPERATURES)
def test_loss_is_the_equation(seed: int, tau: float, tau_m: float):
    assert_same_loss(ressl, naive.ressl, queue_case(seed), temperature=tau, key_temperature=tau_m)
