"""`torch.optim.Optimizer` classes that use the Adam kernels.

A step collects the tensors of all parameter groups in one `LaunchGroup` per device and combination of dtypes, and makes
one launch for each. Together these groups are the `StepPlan`. It is kept for later steps, which compare addresses and
write only those that have changed.

**State.** In memory, ``state[p]`` holds ``step`` (0-dim fp32 on the parameter's device), ``exp_avg``, ``exp_avg_sq``,
``max_exp_avg_sq`` with amsgrad, and for 16-bit parameters with a master ``master``: the fp32 master, or the 16-bit
remainder (int16) of a split master. Both have the same name so that code that looks up the entries of a canonical
checkpoint by the names in memory (``flatten_optimizer_state_dict``, torchtitan) finds them. ``state_dict()`` refers to
these tensors, with other names for codes and remainders (numerics/state_layout.py); ``canonical_state_dict()`` has
``master`` and the moments in fp32. Both load into every other layout with the same bits.
`torch.optim.Optimizer.load_state_dict` would cast the state to the parameter's dtype and is not called. With
``state_dtype="8bit"``, a moment is a tensor of uint8 codes beside the scales of its blocks, ``exp_avg_scale`` for
``exp_avg``, of shape (rows, blocks per row); see kernels/block_codes.py.

**Random bits.** With ``rounding="stochastic"``, those of an element depend on the seed, which is saved, the parameter's
index in the optimizer, its step count and the element's index in the whole, unsharded parameter; see kernels/adam.py.

**Masters and parameters.** If other code writes a parameter between two steps, an old master never overwrites it. A
full master is compared with the parameter if the version or the address of the parameter has changed, and replaced
where it does not round to the parameter. A split master consists of the parameter and the remainder, which stays: the
master keeps every bit where the same value was written, and is within half a bf16 ulp of the parameter everywhere.
Which elements were written is not known, and clearing the whole remainder would lose all updates below that ulp in
training that writes parameters after each step, for example with masks. `refresh_master` clears it on request.

**CUDA graphs.** A captured step uses tables of its own (`halfstep.kernels.streams`) and changes nothing that eager
steps keep, so captures, replays and eager steps can be mixed in any order. A replay uses the options of its capture,
except those that are tensors on the device. Moments, masters and step counts are shared: they must exist before the
capture, after which `load_state_dict` writes into them instead of replacing them.

**Interrupts.** `step` and `load_state_dict` first prepare everything that can fail or take long. They then change
weights and state in one sequence that Ctrl-C does not interrupt (`halfstep.integrations.interrupts`).
"""

from halfstep.integrations.optim.adam import Adam, AdamW
from halfstep.integrations.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
