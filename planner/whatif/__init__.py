"""What if the cluster, the batch or a constant were different: many plans and what they tell."""
