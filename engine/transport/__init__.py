"""The stream of messages between engine and gateways: what is said, how it is written, sockets."""
