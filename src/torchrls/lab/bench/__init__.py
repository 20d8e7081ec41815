"""Benchmarks: time and memory of a training step, beside first-order methods and peers."""
