import math

import pytest

from pretrain import schedule


def test_cosine_ends_and_middle():
    assert schedule.cosine(0.0) == 1.0
    assert schedule.cosine(0.5) == pytest.approx(0.5)
    assert schedule.cosine(1.0) == pytest.approx(0.0, abs=1e-15)
    assert schedule.cosine(0.05, warmup=0.1) == pytest.approx(0.5)
    assert schedule.cosine(0.1, warmup=0.1) == 1.0


def test_step_falls_at_each_milestone():
    rates = [
        schedule.learning_rate(e, 1, 200, base_lr=0.03, kind="step", milestones=[120, 160]) for e in (119, 120, 160)
    ]
    assert rates == pytest.approx([0.03, 0.003, 0.0003])


def test_moco_holds_the_rate_within_an_epoch():
    def rate(step: int) -> float:
        return schedule.learning_rate(step, 10, 200, base_lr=0.03, kind="cosine", per_step=False)

    assert rate(10) == rate(19) == pytest.approx(0.03 * 0.5 * (1 + math.cos(math.pi * 1 / 200)))
    assert rate(20) < rate(19)


def test_warm_up_moves_by_the_step_in_either_form():
    rates = [
        schedule.learning_rate(s, 10, 20, base_lr=1.0, kind="cosine", warmup_epochs=5, per_step=False) for s in (0, 25)
    ]
    assert rates == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize("warmup", [0.5, 1.5])
@pytest.mark.parametrize("kind", ["cosine", "step"])
def test_a_warm_up_that_ends_within_an_epoch_reaches_the_full_rate_there(warmup, kind):
    rates = [
        schedule.learning_rate(s, 10, 20, base_lr=1.0, kind=kind, milestones=[15], warmup_epochs=warmup, per_step=False)
        for s in range(40)
    ]
    end = int(10 * warmup)
    assert rates[:end] == pytest.approx([s / end for s in range(end)])
    rest_of_epoch = rates[end : end + 5]
    assert rest_of_epoch == [1.0] * 5
    after = rates[end + 5 : end + 15]
    assert len(set(after)) == 1 and after[0] == pytest.approx(
        1.0 if kind == "step" else schedule.cosine((end + 5) / 200, warmup / 20)
    )


def test_ema_and_lambda():
    assert schedule.ema_momentum(0.3, 0.99, "constant") == 0.99
    assert schedule.ema_momentum(0.0, 0.99, "cosine") == pytest.approx(0.99)
    assert schedule.ema_momentum(1.0, 0.99, "cosine") == pytest.approx(1.0)
    assert schedule.strength(0, 200, 4.0, "constant") == 4.0
    assert [schedule.strength(e, 200, 2.0, "linear") for e in (0, 199)] == pytest.approx([0.01, 2.0])
