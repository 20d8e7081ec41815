"""Helpers for every room: hyperparameters, numerics, shards, private torch, warnings."""
