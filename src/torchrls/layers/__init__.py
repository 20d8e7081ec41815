"""Layer types: one adapter each, behind a registry that users can extend."""

from torchrls.layers import conv, linear, recurrent

__all__ = ["conv", "linear", "recurrent"]
