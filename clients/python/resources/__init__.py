"""What a server has, one file per API: each operation once, for both clients."""
