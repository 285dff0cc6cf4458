"""Number formats, without torch: what they hold, what a number becomes in one, and what a code says.

Files: ``table.py`` has the formats and their properties; ``exact.py`` reads numbers and rounds one at a time in
rational arithmetic, the specification; ``blocks.py`` does so for blocks that share a scale, ``arrays.py`` for arrays;
``codec.py`` holds the public functions `encode`, `decode` and `round_to`.
"""
