"""A map of frozen features."""

from typing import Any

from pretrain.common.run.state import RunContext

from .probe import Probe
from .registry import register


@register
class Embedding(Probe):
    name = "embedding"
    feature_map = "embedding.csv"

    def run(self, context: RunContext) -> dict[str, Any]:
        from pretrain.probe import embedding

        return embedding.main(self.cfg, self.options.weights, context=context)
