"""TCL's loss is compared with the naive form of its equation, and fulfills Lemma 2 (its gradient) and both theorems."""

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import naive
from pretrain.methods.supcon import supcon
from pretrain.methods.tcl import tcl
from tests.pretrain.methods.draws import (
    LABELS,
    SEEDS,
    TEMPERATURES,
    BatchCase,
    assert_same_loss,
    batch_case,
    drawn,
    sets,
)

WEIGHTS = st.one_of(st.just(0.0), st.floats(0.01, 10_000.0))
AT_LEAST_1 = st.floats(1.0, 10_000.0)


def denominator(case: BatchCase, i: int, tau: float, k1: float, k2: float) -> float:
    """D(z_i), Eq. (19)-(22)."""
    z = case.candidates_BD.detach()
    s = (z @ case.anchors_AD.detach()[i]).tolist()
    positives, negatives = sets(case, i)
    pull = sum(math.exp(s[p] / tau) + k1 * math.exp(-s[p]) for p in positives)
    return pull + k2 * sum(math.exp(s[n] / tau) for n in negatives)


@drawn(seed=SEEDS, tau=TEMPERATURES, k1=WEIGHTS, k2=WEIGHTS)
def test_loss_is_equation_6(seed: int, tau: float, k1: float, k2: float):
    assert_same_loss(tcl, naive.tcl, batch_case(seed, LABELS), temperature=tau, k1=k1, k2=k2)


@pytest.mark.parametrize(("k1", "k2"), [(0.0, 1.0), (50.0, 1.5)])
def test_blocks_of_anchors_add_up_to_the_whole(k1: float, k2: float):
    """300 anchors are two blocks, of which the last is smaller; 60 are a part of one."""

    def compute(anchors: slice) -> list[Tensor]:
        case = batch_case(3, [*LABELS * 37, 3, 2, 1, 0], anchors)
        result = tcl(*case, temperature=0.1, k1=k1, k2=k2)
        gradients = torch.autograd.grad(result.loss, (case.anchors_AD, case.candidates_BD))
        return [result.loss, *gradients, result.metrics["positives_per_anchor"]]

    loss, anchor_gradients, candidate_gradients, positives = compute(slice(300))
    parts = list(zip(*(compute(slice(first, first + 60)) for first in range(0, 300, 60)), strict=True))
    torch.testing.assert_close(loss, torch.stack(parts[0]).mean())
    torch.testing.assert_close(anchor_gradients, torch.cat(parts[1]) / 5)
    torch.testing.assert_close(candidate_gradients, torch.stack(parts[2]).mean(0))
    torch.testing.assert_close(positives, torch.stack(parts[3]).mean())


def lemma_2(case: BatchCase, tau: float, k1: float, k2: float) -> Tensor:
    """Compute the gradient of the loss for each anchor (A, D), as an anchor only; Lemma 1 is k1 = 0, k2 = 1."""
    z = case.candidates_BD.detach()
    expected = torch.zeros_like(case.anchors_AD)
    for i, anchor in enumerate(case.anchors_AD.detach()):
        positives, negatives = sets(case, i)
        if not positives:
            continue  # contributes nothing
        d = denominator(case, i, tau, k1, k2)
        for p in positives:
            s = float(anchor @ z[p])
            expected[i] += z[p] * (math.exp(s / tau) / d - 1 / len(positives) - tau * k1 * math.exp(-s) / d) / tau
        for n in negatives:
            expected[i] += z[n] * k2 * math.exp(float(anchor @ z[n]) / tau) / d / tau
    return expected / len(case.anchors_AD)  # the loss is the mean over anchors


@drawn(seed=SEEDS, tau=TEMPERATURES, k1=st.floats(0.0, 10_000.0), k2=st.floats(0.0, 10.0))
def test_lemma_2_autograd_equals_the_closed_gradient(seed: int, tau: float, k1: float, k2: float):
    case = batch_case(seed, LABELS)
    loss = tcl(*case, temperature=tau, k1=k1, k2=k2).loss
    gradient = torch.autograd.grad(loss, case.anchors_AD)[0]
    torch.testing.assert_close(gradient, lemma_2(case, tau, k1, k2), rtol=1e-7, atol=1e-9)


def responses(loss: Tensor, case: BatchCase, tau: float) -> list[float]:
    """Size of what each candidate gives to the first anchor's gradient: |P - X - Y| or P of Lemma 2.

    For one anchor the gradient that a candidate receives is that size times z_i / tau, and z_i has norm 1.
    """
    return (torch.autograd.grad(loss, case.candidates_BD)[0].norm(dim=1) * tau).tolist()


@drawn(examples=100, seed=SEEDS, tau=TEMPERATURES, k1=AT_LEAST_1, k2=AT_LEAST_1)
def test_theorem_1_hard_positives_pull_more_than_in_supcon(seed: int, tau: float, k1: float, k2: float):
    """Hard is a positive for which SupCon still wants more: P^s below X = 1 / |P|; the least similar one always is."""
    case = batch_case(seed, LABELS, anchors=slice(0, 1))
    positives, _ = sets(case, 0)
    tuned = responses(tcl(*case, temperature=tau, k1=k1, k2=k2).loss, case, tau)
    plain = responses(supcon(*case, temperature=tau).loss, case, tau)
    s = (case.candidates_BD @ case.anchors_AD[0]).tolist()
    share = [math.exp(s[p] / tau) / denominator(case, 0, tau, 0.0, 1.0) for p in positives]
    hard = [p for p, p_s in zip(positives, share, strict=True) if p_s < 1 / len(positives)]
    assert min(positives, key=lambda p: s[p]) in hard
    assert all(tuned[p] > plain[p] for p in hard)


@drawn(examples=100, seed=SEEDS, tau=TEMPERATURES, k1=st.floats(0.1, 10_000.0), k2=st.floats(0.1, 100.0))
def test_theorem_2_negatives_push_more_as_k2_rises(seed: int, tau: float, k1: float, k2: float):
    case = batch_case(seed, LABELS, anchors=slice(0, 1))
    _, negatives = sets(case, 0)
    less = responses(tcl(*case, temperature=tau, k1=k1, k2=k2).loss, case, tau)
    more = responses(tcl(*case, temperature=tau, k1=k1, k2=1.1 * k2).loss, case, tau)
    assert all(more[n] > less[n] > 0 for n in negatives)


def test_an_anchor_without_positives_contributes_nothing():
    hyper = {"temperature": 0.1, "k1": 5000.0, "k2": 1.0}
    whole = batch_case(0, LABELS)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        result = tcl(*whole, **hyper)
        gradient = torch.autograd.grad(result.loss, whole.anchors_AD)[0]
    assert torch.equal(gradient[6], torch.zeros(5, dtype=torch.float64))  # the lone member of label 3
    assert all(metric.isfinite() for metric in result.metrics.values())
    assert (gradient[:6].norm(dim=1) > 0).all()
    index = [j for j in range(len(LABELS)) if j != 6]
    some = tcl(whole[0][index], whole[1], whole[2][index], whole[3], whole[4][index], **hyper)
    torch.testing.assert_close(result.loss, some.loss * 7 / 8)  # it still counts in the mean
    alone = batch_case(0, [0, 1, 2])
    loss = tcl(*alone, **hyper).loss
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, alone.anchors_AD)[0], torch.zeros(3, 5, dtype=torch.float64))


def test_only_positives_and_only_one_candidate_stay_finite():
    assert_same_loss(tcl, naive.tcl, batch_case(0, [4, 4, 4]), temperature=0.1, k1=2.0, k2=1.0)
    single = batch_case(0, [4])
    assert tcl(*single, temperature=0.1, k1=2.0, k2=1.0).loss == 0


@drawn(seed=SEEDS, tau=TEMPERATURES, k1=WEIGHTS, cut=st.integers(1, 7))
def test_shards_of_the_anchors_add_up_to_the_whole(seed: int, tau: float, k1: float, cut: int):
    """Loss and gradient of the global batch are the ranks' means, weighted by their numbers of anchors."""
    hyper = {"temperature": tau, "k1": k1, "k2": 1.5}
    z = batch_case(seed, LABELS).candidates_BD
    labels = torch.tensor(LABELS)
    index = torch.arange(len(LABELS))
    whole = tcl(z, z, labels, labels, index, **hyper).loss
    parts = [tcl(z[part], z, labels[part], labels, index[part], **hyper) for part in (slice(cut), slice(cut, None))]
    total = (parts[0].loss * cut + parts[1].loss * (len(LABELS) - cut)) / len(LABELS)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, z), torch.autograd.grad(whole, z))


def test_metrics():
    candidates = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
    labels = torch.tensor([0, 0, 1, 0])
    result = tcl(candidates, candidates, labels, labels, torch.arange(4), temperature=0.1, k1=1.0, k2=1.0)
    assert result.enqueue_ND is None
    # pairs: 0-1 0.8 (> 0.6), 0-3 0; 1-0 0.8, 1-3 0.6 (< 0.96); 3-0 0, 3-1 0.6 (< 0.8); the third has none
    torch.testing.assert_close(result.metrics["batch_accuracy"], torch.tensor(100 / 6))
    torch.testing.assert_close(result.metrics["positive_similarity"], torch.tensor(2.8 / 6))
    torch.testing.assert_close(result.metrics["positives_per_anchor"], torch.tensor(1.5))

    tied = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8]])  # with a negative
    labels = torch.tensor([0, 0, 1])
    result = tcl(tied, tied, labels, labels, torch.arange(3), temperature=0.1, k1=1.0, k2=1.0)
    assert result.metrics["batch_accuracy"] == 0
