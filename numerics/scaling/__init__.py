"""Loss scaling: whether a gradient is fine, on which ranks that is decided, and what becomes of the scale.

Files: ``scaler.py`` has `GradScaler`, ``verdict.py`` checks gradients and has what a step does about them,
``topology.py`` finds the ranks that share them, ``stand_ins.py`` is ``.grad`` of gradients that are elsewhere,
``overflow.py`` reports which parameters overflowed, ``host_copy.py`` reads device integers without waiting.
"""
