"""Which response an `Idempotency-Key` stands for."""
