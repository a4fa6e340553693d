"""The bodies of requests, validated."""
