"""The kNN score of frozen features."""

from typing import Any

from pretrain.common.run.state import RunContext

from .probe import Probe
from .registry import register


@register
class Knn(Probe):
    name = "knn"
    probe = "kNN"

    def run(self, context: RunContext) -> dict[str, Any]:
        from pretrain.probe import knn

        return knn.main(self.cfg, self.options.weights, context=context)
