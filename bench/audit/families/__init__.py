"""The variants of halfstep's kernels for the audit: one module per kernel family, each with a function `variants`."""
