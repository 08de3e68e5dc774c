import math

import pytest

from pretrain.schedule import compute_ema_momentum, compute_learning_rate


def test_the_rate_falls_along_a_cosine_or_at_each_milestone():
    cosine = [compute_learning_rate(s, 10, 20, base_lr=2.0, kind="cosine") for s in (0, 100, 200)]
    assert cosine == pytest.approx([2.0, 1.0, 0.0], abs=1e-15)
    decay = {"base_lr": 0.03, "kind": "step", "milestones": [120, 160]}
    steps = [compute_learning_rate(epoch, 1, 200, **decay) for epoch in (119, 120, 160)]
    assert steps == pytest.approx([0.03, 0.003, 0.0003])


@pytest.mark.parametrize("warmup", [0.5, 1.5, 5])
@pytest.mark.parametrize("kind", ["cosine", "step"])
def test_a_warm_up_that_ends_within_an_epoch_reaches_the_full_rate_there(warmup, kind):
    rates = [
        compute_learning_rate(s, 10, 20, base_lr=1.0, kind=kind, milestones=[15], warmup_epochs=warmup, per_step=False)
        for s in range(80)
    ]
    end = int(10 * warmup)
    assert rates[:end] == pytest.approx([s / end for s in range(end)])
    next_epoch = -(-(end + 1) // 10) * 10
    assert rates[end:next_epoch] == [1.0] * (next_epoch - end)
    after = rates[next_epoch : next_epoch + 10]
    share = (next_epoch / 200 - warmup / 20) / (1 - warmup / 20)
    expected = 1.0 if kind == "step" else 0.5 * (1 + math.cos(math.pi * share))
    assert len(set(after)) == 1 and after[0] == pytest.approx(expected)


def test_the_ema_momentum():
    of_steps = [
        [compute_ema_momentum(step, total_steps=10, base=0.99, kind=kind) for step in (0, 5, 10)]
        for kind in ("constant", "cosine")
    ]
    assert of_steps == [[0.99] * 3, pytest.approx([0.99, 0.995, 1.0])]
