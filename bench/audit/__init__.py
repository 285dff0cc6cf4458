"""The compile audit, `halfstep bench audit`: what the machine code of every kernel moves and takes, with no GPU."""
