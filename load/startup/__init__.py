"""`penstock bench startup`: from the command to the first token, and the memory it takes."""
