"""Placement of tables inside one pool as an integer linear program."""
