"""What families of decoders are made of, read from config.json; models loaded whole, and made of random weights."""
