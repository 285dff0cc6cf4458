"""What the kernels of all optimizers share: everything but the rule.

An optimizer's kernel family is a rule (a free function in plain torch), a subclass of `layout.KernelLayout`, the rule
as Triton functions, which `blocks.walk` applies between its loads and stores, the same in C++ for optimizer.h, and one
`launch.Family` that names them. `halfstep.kernels.sgd` is the example.

**Step counts** advance by 1 unless the step is skipped: if found_inf != 0, nothing is written, the count included.

**Stochastic rounding.** Values stored in fewer than 32 bits (bf16 moments, an fp16 or bf16 parameter without a
master, a master of 24 bits) are rounded up or down at random, so that their expectation is exact and steps below half a
unit in the last place are not lost. A parameter that has a master is the master rounded to nearest. A running maximum
takes the stored moment, because rounding it stochastically would push it up step by step: the larger of two bf16
numbers needs no rounding, and in 8 bits it is rounded up where its block has wider steps than that of the moment, so
that it is never below it. Encoding it again changes nothing.

The random bits are named by (seed, stream, step, index), as philox.py says, where stream is the parameter's number in
the optimizer, step its count, and index the element's place, row by row, in the whole parameter. Hence the same bits
whatever the launch shape, the batch, the number of ranks and the sharding. The parameter takes draw 0, the moments
draws 1 and 2, so that their roundings are independent. Element i of a shard is element

    base + i // inner * inner_whole + i % inner

of the whole, which describes a range of rows (inner = numel), a range of any other dimension, or both.

**Moments in 8 bits** have the codes of block_codes.py: the first moment signed ones, others positive ones. Their scales
lie in a second tensor, of shape (rows, blocks per row).
"""
