"""Authentication: Host, Origin, API keys, tickets."""
