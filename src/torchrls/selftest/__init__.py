"""The oracle, both algorithms written naively, and ``torchrls doctor``, which compares with it."""
