"""One module per command: parse, one library call, render."""
