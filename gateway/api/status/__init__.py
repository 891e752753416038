"""How the server is: health, metrics, and the numbers of `/dashboard`."""
