"""`penstock bench gateway`: what the gateway costs, in front of an engine that costs nothing."""
