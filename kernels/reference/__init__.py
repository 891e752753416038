"""What each operation means, in plain torch, with its source: the specification of the others."""
