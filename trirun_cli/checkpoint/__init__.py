"""Model directories, packed and plain: the format, reading, writing, verifying, foreign formats, names on the hub."""
