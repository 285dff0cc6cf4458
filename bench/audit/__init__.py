"""The compile audit, `halfstep bench audit`: memory traffic and resources of all compiled kernels, without a GPU."""
