"""The server's APIs, one file each: every operation is written once, for both clients."""
