"""The connection between engine and gateways: messages, their encoding, and sockets."""
