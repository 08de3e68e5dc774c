"""Linear classifiers, trained in parallel on frozen features."""

from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn import functional as F

from .. import schedule
from ..common import distributed
from ..common.errors import UserError
from .features import Features


class Heads(nn.Module):
    """One linear classifier per learning rate of ``settings`` (LINEAR); SGD, gradients averaged over ranks."""

    def __init__(self, features: int, classes: int, settings: CfgNode) -> None:
        super().__init__()
        self.settings = settings
        self.learning_rates = [float(lr) for lr in settings.LRS] or [settings.BASE_LR]
        heads = [nn.Linear(features, classes) for _ in self.learning_rates]
        for head in heads:  # as in MoCo's protocol
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)
        self.heads = nn.ModuleList(heads)
        pairs = zip(self.heads, self.learning_rates, strict=True)
        groups = [{"params": list(head.parameters()), "lr": lr} for head, lr in pairs]
        self.optimizer = torch.optim.SGD(groups, momentum=settings.MOMENTUM, weight_decay=settings.WEIGHT_DECAY)

    def set_learning_rates(self, epoch: int) -> float:
        """Set every head's learning rate for ``epoch``; return the factor of ``learning_rates``."""
        decay = {"kind": self.settings.LR_SCHEDULE, "milestones": self.settings.STEPS, "gamma": self.settings.GAMMA}
        factor = schedule.compute_learning_rate(epoch, 1, self.settings.EPOCHS, base_lr=1.0, **decay)
        for group, lr in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = lr * factor
        return factor

    def step(self, features_nF: Tensor, labels_n: Tensor) -> Tensor:
        """Take one optimizer step on this rank's images; return each head's mean loss over the global batch."""
        losses = torch.stack([F.cross_entropy(head(features_nF), labels_n) for head in self.heads])
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        means = losses.detach()
        distributed.mean_together_([means, *(p.grad for p in self.parameters() if p.grad is not None)])
        self.optimizer.step()
        return means

    @torch.no_grad()
    def score(self, val: Features, held_out: Features | None) -> dict[str, dict[str, float]]:
        """Return top-1 and top-5 (0 to 100) of each head, by learning rate; with ``held_out`` also ``held_out_top1``.

        Diverged heads score 0.

        Raises:
            UserError: all heads have diverged.
        """
        scores: dict[str, dict[str, float]] = {}
        for head, lr in zip(self.heads, self.learning_rates, strict=True):
            name = str(lr).removesuffix(".0")  # exact: the learning rate is read back from it
            if not next(head.parameters()).norm().isfinite():
                scores[name] = {"top1": 0.0, "top5": 0.0, "diverged": True}
                continue
            top1, top5 = _measure_accuracy(head, val)
            scores[name] = {"top1": top1, "top5": top5}
            if held_out:
                scores[name]["held_out_top1"] = _measure_accuracy(head, held_out)[0]
        if all("diverged" in score for score in scores.values()):
            raise UserError("the classifier's weights are not finite; lower LINEAR.BASE_LR or LINEAR.LRS")
        return scores

    def state(self) -> dict[str, Any]:
        return {"state_dict": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.heads.load_state_dict(state["state_dict"])
        self.optimizer.load_state_dict(state["optimizer"])


def _measure_accuracy(head: nn.Module, features: Features) -> tuple[float, float]:
    """Return top-1 and top-5, 0 to 100."""
    top = min(5, features.num_classes)
    ranked = torch.cat([head(part).topk(top).indices for part in features.features_NF.split(4096)])
    correct = (ranked == features.labels_N[:, None]).float()
    return 100 * float(correct[:, 0].mean()), 100 * float(correct.sum(1).mean())
