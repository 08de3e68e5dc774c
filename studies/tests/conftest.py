"""Fixtures that the tests of studies share with the others."""

from tests.conftest import images, tiny_resnet18

__all__ = ["images", "tiny_resnet18"]
