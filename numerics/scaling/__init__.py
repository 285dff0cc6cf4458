"""Loss scaling: whether a gradient is fine, on which ranks that is decided, and what becomes of the scale.

Files: ``scaler.py`` has `GradScaler`, ``decision.py`` checks gradients and has what a step does about them,
``sharding.py`` finds the ranks that share them, ``stand_ins.py`` is ``.grad`` of gradients that are elsewhere,
``overflow.py`` reports which parameters overflowed.
"""
