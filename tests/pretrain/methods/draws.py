"""Random embeddings for the objectives' tests, and how often hypothesis draws them (the same draws every time)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from pretrain.methods import LossOutput

SEEDS = st.integers(0, 2**31 - 1)
TEMPERATURES = st.floats(0.05, 1.0)


def drawn(examples: int = 40, **strategies):
    """Return `@given` with a fixed number of fixed draws, so that a test has the same result on every machine.

    A failing draw is reported as it is: a smaller seed is no simpler case, and the search for one takes a minute.
    """
    phases = (Phase.explicit, Phase.generate)
    fixed = settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=phases)
    return lambda test: fixed(given(**strategies)(test))


def assert_same_loss(
    method: Callable[..., LossOutput], form: Callable[..., Tensor], case: tuple[Tensor, ...], **hyper: Any
) -> None:
    """Compare a method's value, and its gradient for the queries or anchors, with the naive form of its equation."""
    loss = method(*case, **hyper).loss
    expected = form(*case, **hyper)
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-10, abs_tol=1e-12)
    gradients = [torch.autograd.grad(value, case[0])[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients)


def unit(generator: torch.Generator, *shape: int, dim: int = -1) -> Tensor:
    return normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=dim)


class QueueCase(NamedTuple):
    q_ND: Tensor
    keys_MND: Tensor
    queue_DK: Tensor


def queue_case(seed: int, keys: int = 1, queries: int = 3, dims: int = 5, negatives: int = 7) -> QueueCase:
    """Draw keys around their query, as views of one image are."""
    generator = torch.Generator().manual_seed(seed)
    q_ND = unit(generator, queries, dims)
    keys_MND = normalize(q_ND + 0.7 * unit(generator, keys, queries, dims), dim=-1)
    return QueueCase(q_ND.requires_grad_(), keys_MND, unit(generator, dims, negatives, dim=0))


class BatchCase(NamedTuple):
    anchors_AD: Tensor
    candidates_BD: Tensor
    anchor_labels_A: Tensor
    candidate_labels_B: Tensor
    self_index_A: Tensor


def batch_case(seed: int, labels: list[int], anchors: slice = slice(None), dims: int = 5) -> BatchCase:
    """Draw candidates with these labels; the anchors are a slice of them, as separate leaf tensors."""
    generator = torch.Generator().manual_seed(seed)
    candidates_BD = unit(generator, len(labels), dims)
    labels_B = torch.tensor(labels)
    index_A = torch.arange(len(labels))[anchors]
    anchors_AD = candidates_BD[index_A].clone().requires_grad_()
    return BatchCase(anchors_AD, candidates_BD.requires_grad_(), labels_B[index_A], labels_B, index_A)


LABELS = [0, 1, 0, 2, 1, 0, 3, 2]  # label 3 has one member: an anchor without positives
TWO_VIEWS = [0, 1, 2, 3, 0, 1, 2, 3]  # of four images


def sets(case: BatchCase, i: int) -> tuple[list[int], list[int]]:
    """Return P and N of the i-th anchor, as the papers define them."""
    self_index = int(case.self_index_A[i])
    label = int(case.anchor_labels_A[i])
    labels = case.candidate_labels_B.tolist()
    positives = [j for j in range(len(labels)) if labels[j] == label and j != self_index]
    return positives, [j for j in range(len(labels)) if labels[j] != label]
