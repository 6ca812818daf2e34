"""What the user writes (cluster, device, model) and what hwplan answers (plan), as strict types."""
