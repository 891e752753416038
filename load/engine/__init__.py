"""`penstock bench engine`: the engine in this process, and where a step's time goes."""
