"""What a format does to the values of tensors, and the loss scale that suits them.

Files: ``counts.py`` has `statistics`, ``advice.py`` has `advise_scale`, ``updates.py`` counts updates that weights in
16 bits would lose, ``named_tensors.py`` finds tensors in what it is given.
"""
