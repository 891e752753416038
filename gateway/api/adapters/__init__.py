"""Loading and unloading adapters while the server runs."""
