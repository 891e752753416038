"""`penstock bench kv`: what paged KV memory holds, against contiguous allocation."""
