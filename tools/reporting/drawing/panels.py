"""The grid of panels that the figures of a report share, and how a figure is written."""

import io
from pathlib import Path
from typing import Any

from pretrain.common.files import atomic_write


def build_panels(count: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """Return a figure, and its ``count`` panels of ``width`` x ``height`` inches in rows of ``columns``."""
    from matplotlib.figure import Figure  # slow to import

    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options).flatten()
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, list(panels[:count])


def write_png(figure: Any, file: Path, dpi: int) -> None:
    """Write a figure completely or not at all; raise UserError if that is impossible."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=dpi)
    atomic_write(file, image.getvalue())
