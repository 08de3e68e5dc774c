"""Losses of the objectives compared with their plain forms; shape letters are those of pretrain/methods/ops.py."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks import naive
from benchmarks.measure import measure_milliseconds, measure_peak_mib
from pretrain.common.ranks import process_group
from pretrain.methods import METHODS

# Names of methods, and the hyperparameters that are passed to both forms of each.
NAIVE = {
    "mocov2": naive.moco,
    "multikey": naive.multikey,
    "jcl": naive.jcl,
    "sce": naive.sce,
    "ressl": naive.ressl,
    "simclr": naive.supcon,
    "tcl": naive.tcl,
}
_HYPER = {"temperature": 0.2, "key_temperature": 0.05, "lambda_": 0.5, "mask_positive": False, "k1": 1.0, "k2": 1.5}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print median time and peak memory of both forms of each objective, and their ratios; use one thread.

    JCL's supplement, Sec. 2, compares the memory of these forms: the naive form with many keys (Fig. 1(b),
    ``multikey``) stores M' rows of logits per query, JCL's stores one.

    Raises:
        RuntimeError: the losses or gradients of the two forms differ, so that a comparison would mean nothing.
    """
    torch.set_num_threads(1)
    device = process_group.init_process_group()
    q_ND, keys_MND, queue_DK = _draw_vectors(args.queries, args.keys, args.dims, args.negatives, device)
    z_AD = _draw_vectors(args.anchors, 1, args.dims, 1, device)[0]
    index_A = torch.arange(args.anchors, device=device)
    labels_A = index_A % (args.anchors // 2)
    sizes = f"N {args.queries}, M' {args.keys}, D {args.dims}, K {args.negatives}, A {args.anchors}"
    print(f"{sizes}, {device}")
    results: dict[str, dict[str, float | None]] = {}
    for name, naive_loss in NAIVE.items():
        method = METHODS[name]
        hyper = {keyword: _HYPER[keyword] for keyword in method.hyper if keyword in _HYPER}
        if method.kind == "queue":
            tensors = (q_ND, keys_MND if method.many_keys else keys_MND[:1], queue_DK)
        else:
            tensors = (z_AD, z_AD, labels_A, labels_A, index_A)
        fast_form = functools.partial(_compute_loss, method.load_function(), *tensors, **hyper)
        naive_form = functools.partial(naive_loss, *tensors, **hyper)
        results[name] = _compare_forms(name, tensors[0], fast_form, naive_form, args.rounds, device)
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
    name: str,
    x: Tensor,
    fast_form: Callable[[], Tensor],
    naive_form: Callable[[], Tensor],
    rounds: int,
    device: torch.device,
) -> dict[str, float | None]:
    """Measure both forms of a loss with their gradient with respect to ``x``: milliseconds, MiB and their ratios."""
    losses = {"fast": fast_form, "naive": naive_form}
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
