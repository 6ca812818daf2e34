"""Analytical cost model: one file per mechanism, each with its formula in the docstring."""
