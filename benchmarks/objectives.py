"""Losses of the objectives compared with naive forms of their equations, which compute whole rows of logits.

The naive forms use the hyperparameters in `_VALUES`. Shape letters are those of pretrain/methods/ops.py.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.measure import measure_milliseconds, measure_peak_mib
from pretrain.common import distributed
from pretrain.methods import METHODS

_VALUES = {"temperature": 0.2, "key_temperature": 0.05, "lambda_": 0.5, "mask_positive": False, "k1": 1.0, "k2": 1.5}


def _compute_logits(q_ND: Tensor, key_ND: Tensor, queue_DK: Tensor) -> Tensor:
    return torch.cat([(q_ND * key_ND).sum(dim=1, keepdim=True), q_ND @ queue_DK], dim=1) / _VALUES["temperature"]


def naive_moco(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor) -> Tensor:
    logits = _compute_logits(q_ND, keys_MND[0], queue_DK)
    return cross_entropy(logits, torch.zeros(len(q_ND), dtype=torch.long, device=q_ND.device))


def naive_multikey(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor) -> Tensor:
    return torch.stack([naive_moco(q_ND, key_ND[None], queue_DK) for key_ND in keys_MND]).mean()


def naive_jcl(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor) -> Tensor:
    mean_ND = keys_MND.mean(dim=0)
    centered_MND = keys_MND - mean_ND
    covariance_NDD = torch.einsum("mnd,mne->nde", centered_MND, centered_MND) / len(keys_MND)
    logits = _compute_logits(q_ND, mean_ND, queue_DK)
    weight = _VALUES["lambda_"] / (2 * _VALUES["temperature"] ** 2)
    bonus = weight * torch.einsum("nd,nde,ne->n", q_ND, covariance_NDD, q_ND)
    positive = logits[:, 0]
    logits = torch.cat([(positive + bonus)[:, None], logits[:, 1:]], dim=1)
    return (logits.logsumexp(dim=1) - positive).mean()


def naive_sce(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor) -> Tensor:
    relations = torch.cat([q_ND.new_zeros(len(q_ND), 1), keys_MND[0] @ queue_DK], dim=1)  # the positive's logit is 0
    target = (relations / _VALUES["key_temperature"]).softmax(dim=1) * (1 - _VALUES["lambda_"])
    target[:, 0] += _VALUES["lambda_"]
    return cross_entropy(_compute_logits(q_ND, keys_MND[0], queue_DK), target)


def naive_ressl(q_ND: Tensor, keys_MND: Tensor, queue_DK: Tensor) -> Tensor:
    target = (keys_MND[0] @ queue_DK / _VALUES["key_temperature"]).softmax(dim=1)
    return cross_entropy(q_ND @ queue_DK / _VALUES["temperature"], target)


def naive_tcl(z_AD: Tensor, labels_A: Tensor, k1: float, k2: float) -> Tensor:
    """Compute Eq. (6) of TCL's supplement among the anchors themselves."""
    tau = _VALUES["temperature"]
    similarity_AA = z_AD @ z_AD.T
    same_AA = labels_A[:, None] == labels_A
    positive_AA = (same_AA & ~torch.eye(len(z_AD), dtype=torch.bool, device=z_AD.device)).to(z_AD.dtype)
    terms_AA = positive_AA * ((similarity_AA / tau).exp() + k1 * (-similarity_AA).exp())
    d_A = (terms_AA + ~same_AA * k2 * (similarity_AA / tau).exp()).sum(dim=1, keepdim=True)
    return (positive_AA * (d_A.log() - similarity_AA / tau)).sum(dim=1).div(positive_AA.sum(dim=1)).mean()


NAIVE = {"mocov2": naive_moco, "multikey": naive_multikey, "jcl": naive_jcl, "sce": naive_sce, "ressl": naive_ressl}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print median time and peak memory of both forms of each objective, and their ratios; use one thread.

    JCL's supplement, Sec. 2, compares the memory of these forms: the naive form with many keys (Fig. 1(b),
    ``multikey``) stores M' rows of logits per query, JCL's stores one.

    Raises:
        RuntimeError: the losses or gradients of the two forms differ, so that a comparison would mean nothing.
    """
    torch.set_num_threads(1)
    device = distributed.init_process_group()
    q_ND, keys_MND, queue_DK = _draw_vectors(args.queries, args.keys, args.dims, args.negatives, device)
    z_AD = _draw_vectors(args.anchors, 1, args.dims, 1, device)[0]
    index_A = torch.arange(args.anchors, device=device)
    labels_A = index_A % (args.anchors // 2)
    sizes = f"N {args.queries}, M' {args.keys}, D {args.dims}, K {args.negatives}, A {args.anchors}"
    print(f"{sizes}, {device}")
    results: dict[str, dict[str, float | None]] = {}
    for name in (*NAIVE, "simclr", "tcl"):
        method = METHODS[name]
        hyper = {keyword: _VALUES[keyword] for keyword in method.hyper if keyword in _VALUES}
        if name in NAIVE:
            tensors = (q_ND, keys_MND if method.many_keys else keys_MND[:1], queue_DK)
            naive = functools.partial(NAIVE[name], *tensors)
        else:
            tensors = (z_AD, z_AD, labels_A, labels_A, index_A)
            naive = functools.partial(naive_tcl, z_AD, labels_A, hyper.get("k1", 0.0), hyper.get("k2", 1.0))
        fast = functools.partial(_compute_loss, method.loss_function, *tensors, **hyper)
        results[name] = _compare_forms(name, tensors[0], fast, naive, args.rounds, device)
    head = ["objective", "ms", "naive ms", "times faster", "MiB", "naive MiB", "times smaller"]
    rows = [[name, *result.values()] for name, result in results.items()]
    print(tabulate(rows, head, floatfmt=("", ".2f", ".2f", ".2f", ".1f", ".1f", ".1f"), missingval="-"))
    return {"sizes": sizes, "objectives": results}


def _compute_loss(objective: Callable[..., Any], *tensors: Tensor, **hyper: Any) -> Tensor:
    return objective(*tensors, **hyper).loss


def _compute_gradient(compute_loss: Callable[[], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient with respect to ``x``."""
    loss = compute_loss()
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def _compare_forms(
    name: str, x: Tensor, fast: Callable[[], Tensor], naive: Callable[[], Tensor], rounds: int, device: torch.device
) -> dict[str, float | None]:
    """Measure both forms of a loss with their gradient with respect to ``x``: milliseconds, MiB and their ratios."""
    losses = {"fast": fast, "naive": naive}
    forms = {form: functools.partial(_compute_gradient, loss, x) for form, loss in losses.items()}
    for actual, expected in zip(forms["fast"](), forms["naive"](), strict=True):
        if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"{name}: the fast and the naive form differ by {(actual - expected).abs().max():.2g}")
    memory = {form: measure_peak_mib(compute, device) for form, compute in forms.items()}
    times = measure_milliseconds(forms, rounds)
    return {
        "ms": times["fast"],
        "naive_ms": times["naive"],
        "times_faster": times["naive"] / times["fast"],
        "mib": memory["fast"],
        "naive_mib": memory["naive"],
        "times_smaller": memory["naive"] / memory["fast"] if memory["fast"] else None,
    }


def _draw_vectors(queries: int, keys: int, dims: int, negatives: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw unit-norm queries (N, D) with gradient, keys (M', N, D) near them, and a queue (D, K)."""
    torch.manual_seed(0)
    q_ND = normalize(torch.randn(queries, dims, device=device), dim=1).requires_grad_()
    keys_MND = normalize(q_ND.detach() + 0.5 * torch.randn(keys, queries, dims, device=device), dim=2)
    return q_ND, keys_MND, normalize(torch.randn(dims, negatives, device=device), dim=0)
