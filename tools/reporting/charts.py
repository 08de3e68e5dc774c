"""matplotlib figures as SVG for the page: transparent, in its text color, the same bytes for the same numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# A color that nothing else has, which stands for the text's. The media query holds in an <img> of the page, too.
_INK = "#010203"
_STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#d5d9e0}}</style>"
_SETTINGS: Any = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.framealpha": 0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False,
    "text.parse_math": False,  # the name of a run may hold a $
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK
    ),
}  # fmt: skip
COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#c9a227",
    "#66bbdd",
    "#aa3377",
    "#8c8c8c",
)  # distinguishable for color-blind people
DASHES = ("solid", "dashed", "dotted")  # CSS and matplotlib share these words


Styles = dict[str, tuple[str, str]]  # name -> color and dashes


@dataclass(frozen=True)
class Line:
    """Points of one run; lines of the same ``name`` look alike."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def looks(names: Sequence[str]) -> Styles:
    """Color and dashes of each name."""
    return {name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i, name in enumerate(names)}


def svg(draw: Callable[[], Any]) -> str:
    """The figure that ``draw`` returns."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": "report"}):
        draw().savefig(file, format="svg", metadata={"Date": None})
    head, _, body = file.getvalue().partition("<defs>")
    return f"{head}{_STYLE}<defs>{body}".replace(_INK, "currentColor")


def line_chart(title: str, lines: Sequence[Line], styles: Styles) -> str:
    """A metric over iterations as SVG; the page has the legend."""

    def draw() -> Any:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(4.2, 2.6))
        figure.subplots_adjust(left=0.15, right=0.97, bottom=0.18, top=0.89)  # a layout by size takes twice the time
        axes = figure.add_subplot()
        alpha = 0.6 if len(lines) > len({line.name for line in lines}) else 1.0  # several seeds
        for line in lines:
            color, dashes = styles[line.name]
            axes.plot(line.x, line.y, color=color, ls=dashes, lw=1.3, alpha=alpha)
        axes.set_title(title)
        axes.set_xlabel("iteration")
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.25)
        return figure

    return svg(draw)
