"""Helpers that every room may use: hyperparameters, numerics, shards, private torch, warnings."""
