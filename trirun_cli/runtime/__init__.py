"""Running models: decoding, sampling, scoring."""
