"""What to do: specs, cost model, ILP, search. Imports neither torch nor ray."""
