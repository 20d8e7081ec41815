"""Layer types: one adapter each, behind a registry that users can extend."""

from torchrls.layers import attention, conv, linear, recurrent

__all__ = ["attention", "conv", "linear", "recurrent"]
