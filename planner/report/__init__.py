"""What a person reads: plans, comparisons and lists rendered for the terminal."""
