"""A map of frozen features."""

from typing import Any

from pretrain.common.run.state import Job

from .base import register
from .probe import Probe


@register
class Embedding(Probe):
    name = "embedding"
    feature_map = "embedding.csv"

    def run(self, job: Job) -> dict[str, Any]:
        from pretrain.probe import embedding

        return embedding.main(self.cfg, self.options.weights, job=job)
