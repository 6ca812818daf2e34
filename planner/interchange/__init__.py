"""Other systems' files: their table lists in, TorchRec sharding plans and constraints out."""
