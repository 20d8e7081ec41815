"""Experiments against Adam; needs ``pip install torchrls[experiments]``."""
