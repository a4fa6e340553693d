"""Products whose sums are kept in fp16: operators, layer, CUDA plans and the reference."""
