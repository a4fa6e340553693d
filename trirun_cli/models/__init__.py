"""What families of decoders are made of, read from config.json """
