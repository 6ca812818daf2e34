"""The hwplan command line."""
