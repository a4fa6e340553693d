"""Foreign packed formats, one file each."""
