"""trirun inside of other libraries: transformers and lm-eval."""
