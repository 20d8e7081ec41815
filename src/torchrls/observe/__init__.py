"""Everything that touches the model: hooks, autograd identities, records of rows."""
