"""How fast RLS learns: ten tasks, and rivals whose learning rates were searched for."""
