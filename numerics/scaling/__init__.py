"""Loss scaling: whether a gradient is fine, on which ranks that is decided, and what becomes of the scale.

Files: ``scaler.py`` has `GradScaler`, ``gradients.py`` checks gradients, ``topology.py`` finds the ranks that share
them and combines their answers, ``overflow.py`` reports which parameters overflowed, ``host_copy.py`` reads device
integers without waiting, ``foreign_scalers.py`` is what our optimizers tell scalers of others.
"""
