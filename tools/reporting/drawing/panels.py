"""The grid of panels that the figures of a report share."""

from typing import Any


def build_panels(count: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """Return a figure, and its ``count`` panels of ``width`` x ``height`` inches in rows of ``columns``."""
    from matplotlib.figure import Figure  # slow to import

    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options).flatten()
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, list(panels[:count])
