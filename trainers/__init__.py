"""Compute on one rank: models, data, kernels and the training loop of a plan."""
