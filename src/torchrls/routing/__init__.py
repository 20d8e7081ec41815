"""Which parameter is trained by which rule, and the param groups that follow from it."""
