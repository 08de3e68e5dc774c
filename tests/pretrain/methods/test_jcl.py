"""JCL's loss against the naive form of Eq. (8) with an explicit covariance, and the paper's own statements about it."""

import math

import numpy
import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import naive
from pretrain.methods.jcl import jcl
from pretrain.methods.moco import moco
from tests.pretrain.methods.draws import SEEDS, TEMPERATURES, QueueCase, assert_same_loss, drawn, queue_case, unit

LAMBDAS = st.floats(0.0, 10.0)


@drawn(seed=SEEDS, temperature=TEMPERATURES, lambda_=LAMBDAS)
def test_loss_is_equation_8_with_the_explicit_covariance(seed: int, temperature: float, lambda_: float):
    assert_same_loss(jcl, naive.jcl, queue_case(seed, keys=5), temperature=temperature, lambda_=lambda_)


@drawn(seed=SEEDS, temperature=TEMPERATURES, lambda_=LAMBDAS)
def test_constant_keys_close_the_gap(seed: int, temperature: float, lambda_: float):
    """For a constant k, Eq. (7) is an equality: Eq. (8) then equals Eq. (4) for every lambda."""
    q, keys, queue = queue_case(seed)
    loss = jcl(q, keys.expand(6, -1, -1), queue, temperature=temperature, lambda_=lambda_).loss
    torch.testing.assert_close(loss, moco(q, keys, queue, temperature=temperature).loss)


@drawn(seed=SEEDS, temperature=st.floats(0.3, 1.0))
def test_only_constant_keys_close_the_gap(seed: int, temperature: float):
    """Eq. (8) is above Eq. (4), a one-dimensional integral for Gaussian keys (computed by Gauss-Hermite quadrature)."""
    q, keys, queue = queue_case(seed, keys=5, queries=1)
    logits = (keys[:, 0] @ q[0] / temperature).detach()
    nodes, weights = map(torch.from_numpy, numpy.polynomial.hermite_e.hermegauss(64))
    positives = logits.mean() + logits.std(correction=0) * nodes
    losses = torch.logaddexp(positives, (q[0] @ queue / temperature).logsumexp(dim=0).detach()) - positives
    equation_4 = (losses * weights).sum() / weights.sum()
    assert jcl(q, keys, queue, temperature=temperature, lambda_=1.0).loss > equation_4 + 1e-8


def gaussian_case(seed: int, spread: float) -> tuple[QueueCase, Tensor]:
    """Build keys whose sample mean and biased covariance are mu and Sigma, and draw 100,000 from N(mu, Sigma)."""
    dims = 3
    generator = torch.Generator().manual_seed(seed)
    q = unit(generator, 1, dims)
    mu = unit(generator, dims)
    root = spread * torch.randn(dims, dims, generator=generator, dtype=torch.float64)  # Sigma = root root^T
    offsets = math.sqrt(dims) * root.T  # rows; with both signs: mean 0, covariance root root^T
    keys = (mu + torch.cat([offsets, -offsets]))[:, None, :]
    noise = torch.randn(50_000, dims, generator=generator, dtype=torch.float64) @ root.T
    return QueueCase(q, keys, unit(generator, dims, 6, dim=0)), mu + torch.cat([noise, -noise])


@drawn(examples=20, seed=SEEDS, spread=st.floats(0.05, 0.2))
def test_equation_8_is_equation_7_for_gaussian_keys(seed: int, spread: float):
    """Monte Carlo sampling confirms the closed form of Eq. (8), and with it the factor 1/2 and lambda = 1."""
    temperature = 0.5
    case, draws = gaussian_case(seed, spread)
    q = case.q_ND[0]
    covariance = naive.compute_covariance(case.keys_MND)[0]
    torch.testing.assert_close(covariance, draws.T.cov(), rtol=0.05, atol=0.05 * spread**2)  # the construction holds
    logits = draws @ q / temperature
    negative = (q @ case.queue_DK / temperature).exp().sum()
    expected = (logits.exp().mean() + negative).log() - logits.mean()
    error = 5 * float(logits.exp().std()) / math.sqrt(len(logits)) / float(logits.exp().mean() + negative)
    loss = jcl(*case, temperature=temperature, lambda_=1.0).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=error)
    without = jcl(*case, temperature=temperature, lambda_=0.0).loss
    if loss - without > 10 * error:  # the tolerance is small enough to notice a missing covariance term
        assert abs(float(without - expected)) > error


@drawn(seed=SEEDS, temperature=TEMPERATURES, lambda_=st.floats(0.0, 4.0), step=st.floats(0.05, 0.5))
def test_loss_falls_as_the_mean_key_nears_the_query_and_the_negatives_leave_it(seed, temperature, lambda_, step):
    q, keys, queue = queue_case(seed, keys=5, queries=1)
    hyper = {"temperature": temperature, "lambda_": lambda_}
    before = jcl(q, keys, queue, **hyper).loss
    assert jcl(q, keys + step * q, queue, **hyper).loss < before  # mu moves, Sigma stays
    assert jcl(q, keys, queue - step * q.T, **hyper).loss < before


def test_metrics():
    q, keys, queue = queue_case(3, keys=5)
    result = jcl(q, keys, queue, temperature=0.2, lambda_=4.0)
    covariances = naive.compute_covariance(keys)
    diagonal = torch.stack([covariance.diagonal() for covariance in covariances]).mean()
    torch.testing.assert_close(result.metrics["positive_variance"], diagonal)
    along = sum(v @ covariance @ v for v, covariance in zip(q.detach(), covariances, strict=True)) / 3
    torch.testing.assert_close(result.metrics["query_variance"], along)


@drawn(seed=SEEDS, temperature=TEMPERATURES)
def test_the_negatives_vanish_as_lambda_grows(seed: int, temperature: float):
    """The covariance's logit then outweighs every negative, so that the loss is lambda / 2 times the variance."""
    q, keys, queue = queue_case(seed, keys=5)
    lambda_ = 1e7
    variance = ((keys * q).sum(dim=2) / temperature).var(dim=0, correction=0).mean()
    losses = [jcl(q, keys, n, temperature=temperature, lambda_=lambda_).loss for n in (queue, -queue)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(losses[0], lambda_ / 2 * variance, rtol=1e-12, atol=0)
