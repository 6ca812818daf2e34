"""Measurements and fits behind the numbers in device profiles and docs."""
