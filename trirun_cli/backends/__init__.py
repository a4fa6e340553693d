"""Running models: which backend runs which directory, and the weights, runner and sampler of each."""
