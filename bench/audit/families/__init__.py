"""The kernel variants to audit: one module per kernel family, each with a function `variants`."""
