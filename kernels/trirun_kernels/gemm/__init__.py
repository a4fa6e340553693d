"""Matrix products with packed weights: the operators, ``Int2Linear``, one file per device and the reference."""
