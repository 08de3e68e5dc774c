"""SupCon's loss against a loop over L_out, and TCL at k1 = 0, k2 = 1."""

from __future__ import annotations

import math

import torch

from pretrain.methods.supcon import supcon
from pretrain.methods.tcl import tcl
from tests.pretrain.methods.draws import LABELS, SEEDS, TEMPERATURES, BatchCase, batch_case, drawn


def oracle(case: BatchCase, temperature: float) -> float:
    z, labels = case.candidates_BD.detach(), case.candidate_labels_B.tolist()
    total = 0.0
    for i in case.self_index_A.tolist():
        others = [a for a in range(len(labels)) if a != i]
        positives = [a for a in others if labels[a] == labels[i]]
        everything = sum(math.exp(float(z[i] @ z[a]) / temperature) for a in others)
        for p in positives:
            total -= math.log(math.exp(float(z[i] @ z[p]) / temperature) / everything) / len(positives)
    return total / len(case.self_index_A)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_loss_is_l_out(seed: int, temperature: float):
    case = batch_case(seed, LABELS)
    assert math.isclose(supcon(*case, temperature=temperature).loss.item(), oracle(case, temperature), rel_tol=1e-9)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_tcl_nears_supcon_as_k1_vanishes(seed: int, temperature: float):
    case = batch_case(seed, LABELS)
    near = tcl(*case, temperature=temperature, k1=1e-9, k2=1.0).loss
    torch.testing.assert_close(near, supcon(*case, temperature=temperature).loss, rtol=1e-6, atol=1e-6)
