"""Triton GEMM kernels: one family for the three layouts, chosen by the plan."""
