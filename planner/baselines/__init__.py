"""What plans are measured against: the naive port and an exhaustive oracle."""
