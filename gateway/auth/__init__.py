"""Who calls, and what they may do: Host, Origin, API keys, tickets."""
