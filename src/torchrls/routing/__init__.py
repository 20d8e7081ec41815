"""The rule that trains each parameter, and the param groups that follow from it."""
