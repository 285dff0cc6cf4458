"""What the compile audit builds of halfstep's kernels: a module per kernel family, each with a function `variants`."""
