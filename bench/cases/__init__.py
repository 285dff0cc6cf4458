"""The cases of `halfstep bench run`: one module per group, listed in `catalogue`."""
