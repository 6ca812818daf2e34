"""Checkpoints that any plan of the same model can go on from (docs/checkpoints.md)."""
