"""The registry of methods: name -> declaration. Command lines read it, so it imports no torch."""

from typing import Any

from ..common.config.limits import ABOVE_0, AT_LEAST_0, FRACTION, Choice
from .method import TEMPERATURE, Hyperparameter, LossOutput, Method

__all__ = ["METHODS", "TEMPERATURE", "Hyperparameter", "LossOutput", "Method"]

KEY_TEMPERATURE = Hyperparameter("METHOD.KEY_TEMPERATURE", 0.05, ABOVE_0, "tau_m, of the key encoder's similarities")
JCL_LAMBDA = Hyperparameter("METHOD.JCL_LAMBDA", 1.0, AT_LEAST_0, "lambda, the weight of the covariance")
_SCHEDULES = Choice(("constant", "linear"))
_LINEAR = "linear: lambda rises over the epochs to JCL_LAMBDA, as in the released code"
LAMBDA_SCHEDULE = Hyperparameter("METHOD.LAMBDA_SCHEDULE", "constant", _SCHEDULES, _LINEAR)
SCE_LAMBDA = Hyperparameter("METHOD.SCE_LAMBDA", 0.5, FRACTION, "lambda: 1 is MoCo, 0 is ReSSL")
_MASK = "True: the equation (s_ii = 0); False: the published pseudo-code (a logit of 0)"
MASK_POSITIVE = Hyperparameter("METHOD.MASK_POSITIVE", False, Choice((False, True)), _MASK)
K1 = Hyperparameter("METHOD.K1", 1.0, AT_LEAST_0, "weight of the positives' term")
K2 = Hyperparameter("METHOD.K2", 1.0, AT_LEAST_0, "weight of the negatives' term")


def _schedule_jcl(epoch: int, epochs: int, hyper: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords in an epoch; lambda is ``constant`` (the paper) or ``linear`` (its released code)."""
    jcl_lambda = hyper["lambda_"]
    if hyper["lambda_schedule"] == "linear":
        jcl_lambda = jcl_lambda * (epoch + 1) / epochs
    return {"temperature": hyper["temperature"], "lambda_": jcl_lambda}


_TAU = {"temperature": TEMPERATURE}
_JCL = {**_TAU, "lambda_": JCL_LAMBDA, "lambda_schedule": LAMBDA_SCHEDULE}
_RESSL = {**_TAU, "key_temperature": KEY_TEMPERATURE}
_SCE = {**_RESSL, "lambda_": SCE_LAMBDA, "mask_positive": MASK_POSITIVE}
_TCL = {**_TAU, "k1": K1, "k2": K2}
METHODS: dict[str, Method] = {
    "mocov1": Method("moco:moco", "queue", _TAU),
    "mocov2": Method("moco:moco", "queue", _TAU),
    "multikey": Method("multikey:multikey", "queue", _TAU, many_keys=True),
    "jcl": Method("jcl:jcl", "queue", _JCL, many_keys=True, schedule=_schedule_jcl),
    "sce": Method("sce:sce", "queue", _SCE),
    "ressl": Method("ressl:ressl", "queue", _RESSL),
    "tcl": Method("tcl:tcl", "batch", _TCL, supervised=True),
    "supcon": Method("supcon:supcon", "batch", _TAU, supervised=True),
    "simclr": Method("supcon:supcon", "batch", _TAU),
}
