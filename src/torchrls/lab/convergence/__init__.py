"""The convergence races: ten tasks, RLS, and rivals whose learning rates were searched for."""
