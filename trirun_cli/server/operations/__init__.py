"""What operators see: metrics, logs, traces."""
