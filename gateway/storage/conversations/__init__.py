"""Conversations: trees of stored turns, in memory or in Redis, behind one contract."""
