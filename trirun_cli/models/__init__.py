"""What families of decoders are made of, read from config.json and from the names of stored tensors."""
