"""Shared by all pictures: figures without a display, a common look, and files that depend only on their content.

matplotlib is optional (the extra `plots`) and imported only when a picture is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

INSTALL = "pip install 'matplotlib>=3.8'"  # not the extra: this needs neither a clone nor an index with halfstep
MISSING = f"pictures need matplotlib, which is not installed: {INSTALL}"
# matplotlib would write the time into the file.
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """An empty figure of a size in inches. It belongs to no window and to no global state of matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    drawing = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(drawing)
    return drawing


def save(drawing: Any, to: str | Path | IO[str], dpi: int = 110) -> None:
    """Write a figure to a file in the format of its suffix, or as SVG to a stream. Text in SVG files stays text."""
    from matplotlib import rc_context

    suffix = Path(to).suffix.lower() if isinstance(to, (str, Path)) else ".svg"
    with rc_context({"svg.hashsalt": "halfstep", "svg.fonttype": "none"}):
        drawing.savefig(to, format=suffix[1:], dpi=dpi, metadata=_UNDATED.get(suffix))


def tidy(axes: Any, grid: str, without: tuple[str, ...] = ("top", "right")) -> None:
    """Remove sides of the box around `axes`, and draw grid lines of the axis `grid` behind the content."""
    axes.spines[list(without)].set_visible(False)
    axes.grid(axis=grid, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
