"""`torch.optim.Optimizer` classes over the Adam kernels.

A step gathers, per device and dtype combination, the tensors of all parameter groups into one `LaunchGroup`, and makes
one launch for each. Together they are the `StepPlan`, which is kept: later steps compare addresses and write down only
those that moved.

**State.** In memory ``state[p]`` holds ``step`` (0-dim fp32 on the parameter's device), ``exp_avg``, ``exp_avg_sq``,
with amsgrad ``max_exp_avg_sq``, and for a low-precision parameter ``master``: fp32, or, where the master is split, the
16 bits (int16) that complete the bf16 parameter to it. The name is one so that code that looks for a checkpoint's
entries by the names in memory (``flatten_optimizer_state_dict``, torchtitan) finds it. ``state_dict()`` is canonical:
whatever the layout, it has ``master`` and the moments in fp32, so it loads bit for bit into every other one.
`torch.optim.Optimizer.load_state_dict` would cast all of it to the parameter's dtype; ours does not call it.

**Random bits.** With ``rounding="stochastic"`` every rounding is named by the seed, the parameter's number in the
optimizer (over all groups, as in ``state_dict``), its step count and the element's place in the whole parameter, shards
included: kernels/adam.py. The seed is saved with the groups' options, so a resumed run draws what an uninterrupted one
would have drawn, on any number of ranks.

**The master is the weight.** Loading a checkpoint sets both it and the visible parameter, its rounding. A parameter
written from outside between steps (``load_state_dict`` of the model, ``copy_``, a weight swap) is never overwritten by
a stale master. A full master is compared with the parameter once its version or address has changed, and replaced
where it no longer rounds to it. A split master is the parameter and 16 bits more, which stay: it keeps every bit where
the same was written again, and lies within half a bf16 ulp of the parameter everywhere. Which elements were written
cannot be told, and to drop the bits of all would, in a training that writes after each step (masks, weight clipping),
lose every update below that ulp. `refresh_master` drops them on demand.

**CUDA graphs.** A step that is captured makes tables of its own, which nothing else sees (`halfstep.kernels.streams`),
and leaves no trace in what eager steps keep: captures, replays and eager steps mix in any order. A replay steps with
the options of its capture, but for those that are tensors on the device. Moments, masters and step counts are shared:
they must be there before, and once captured `load_state_dict` writes into them instead of replacing them. A replay does
not see that a parameter with a full master was written from outside; call `refresh_master` before it.

**Interrupts.** `step` and `load_state_dict` first prepare everything that can fail or take long, and then change
weights and state in one sequence that Ctrl-C does not divide (`halfstep.integrations.interrupts`).
"""

from halfstep.integrations.optim.classes import Adam, AdamW

__all__ = ["Adam", "AdamW"]
