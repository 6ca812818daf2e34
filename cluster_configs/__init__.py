"""Cluster descriptions and device profiles that ship with hwplan."""
