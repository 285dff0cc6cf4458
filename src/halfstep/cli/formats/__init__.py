"""``halfstep format, encode, decode, why, compare, ladder``: what a format can hold, what a number becomes."""
