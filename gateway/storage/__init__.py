"""Storage that outlives a request, in memory or in Redis: conversations and response logs."""
