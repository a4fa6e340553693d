"""transformers' own modelling, for families that the native decoder does not run."""
