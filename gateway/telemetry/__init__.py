"""What is told of the gateway: metrics, the request log, traces."""
