"""A model as the quantizer reads it, block by block: loading, experts, activations between blocks, writing."""
