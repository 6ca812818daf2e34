"""Kernel preselection: which kernel runs each matrix product, without a tuning run."""
