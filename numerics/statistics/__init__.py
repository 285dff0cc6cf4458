"""What a format does to the values of tensors, and the loss scale that suits them.

Files: ``counts.py`` has `statistics`, ``advice.py`` has `advise_scale`, ``named_tensors.py`` finds tensors in an
argument.
"""
