"""trirun: quantize language models to 2 bits or ternary, and run them."""

__version__ = "0.1.0"
