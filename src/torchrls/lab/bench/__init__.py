"""The benchmarks: time and memory of a training step of RLS, first-order methods and peers."""
