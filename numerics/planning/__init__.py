"""The planner: memory per GPU by part, communication and FLOPs per step, and changes that make a training fit a GPU.

    >>> from halfstep.numerics.planning import Transformer, plan
    >>> plan(7e9, gpus=8, strategy="fsdp", optimizer="halfstep").totals.state
    12250000000

All sizes are integers in bytes. A part is *exact* if it equals the allocated bytes: weights, gradients, states and
DDP's buckets. The other parts are estimates by the formulas cited in ``work.py`` and ``sharding.py``. The CUDA context,
communication libraries, allocator fragmentation and the workspaces of matrix libraries are not counted; `usable`
subtracts a reserve for them. Importing this package does not import torch.
"""

from halfstep.numerics.planning.catalog import CARDS, MODELS, RESERVE, Card, card, from_config, usable
from halfstep.numerics.planning.changes import Way, ways_to_fit
from halfstep.numerics.planning.layouts import LAYOUTS, OPTIMIZERS, PRECISIONS, Layout, layout
from halfstep.numerics.planning.models import Tensor, Transformer, Unit, unit
from halfstep.numerics.planning.plans import Part, Plan, Totals, Work, plan
from halfstep.numerics.planning.sharding import STRATEGIES, Collective, Strategy
from halfstep.numerics.planning.training import Training
from halfstep.numerics.planning.work import CHECKPOINTING

__all__ = [
    "CARDS", "CHECKPOINTING", "LAYOUTS", "MODELS", "OPTIMIZERS", "PRECISIONS", "RESERVE", "STRATEGIES",
    "Card", "Collective", "Layout", "Part", "Plan", "Strategy", "Tensor", "Totals", "Training", "Transformer", "Unit",
    "Way", "Work", "card", "from_config", "layout", "plan", "unit", "usable", "ways_to_fit",
]  # fmt: skip
