"""What the pages ask: ``answer(request) -> dict``, on this machine by a local server, on the site by Pyodide.

A request is ``{"page": "explorer" or "planner", "state": texts by the keys of the page's address, "move": what was
pressed or chosen}``. An answer has the state after the move, texts and widths, which the page only draws, and in
``error`` what is refused. It is the same in CPython and in Pyodide. This needs neither torch nor numpy.
"""

from __future__ import annotations

from typing import Any

from halfstep.cli.pages.explorer import CHOICES, explorer
from halfstep.cli.pages.explorer import EXAMPLE as EXPLORER
from halfstep.cli.pages.planner import EXAMPLE as PLANNER
from halfstep.cli.pages.planner import planner
from halfstep.numerics.formats.table import formats

EXAMPLES = {"explorer": EXPLORER, "planner": PLANNER}
_ANSWERS = {"explorer": explorer, "planner": planner}


def answer(request: Any) -> dict[str, Any]:
    """The answer to a request; ``{"refused": reason}`` if it is none."""
    request = request if isinstance(request, dict) else {}
    page, state, move = (request.get(name) for name in ("page", "state", "move"))
    texts = isinstance(state, dict) and all(isinstance(text, str) for text in (*state, *state.values()))
    if page not in _ANSWERS or not texts or not isinstance(move or {}, dict):
        return {"refused": "expected a page, its state and a move"}
    try:
        return _ANSWERS[page](state, move or {})
    except ValueError as error:
        return {"refused": str(error)}


# What the explorer shows in every state.
FIXED = {"choices": CHOICES, "formats": [[name, format.title] for name, format in formats.items()]}
