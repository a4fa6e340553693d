"""Model directories and packed checkpoints: reading, writing, checking, and the hub they come from."""
