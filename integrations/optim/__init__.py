"""`torch.optim.Optimizer` classes that use halfstep's kernels.

A step collects the tensors of all parameter groups in one `LaunchGroup` per device and combination of dtypes, and makes
one launch for each. Together these groups are the `StepPlan`. It is kept for later steps, which compare addresses and
write only those that have changed. How a parameter's state is held is said by `halfstep.numerics.state_layout`, its
random bits by kernels/optimizer.

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
from halfstep.integrations.optim.muon import Muon, muon_groups
from halfstep.integrations.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon", "muon_groups"]
