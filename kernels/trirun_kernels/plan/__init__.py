"""From a problem (m, n, k, grid, device) to a plan: which CUDA kernel runs, with which tile and how many CTAs."""
