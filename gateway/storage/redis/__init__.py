"""Redis: its clients, their errors and health, and what gateways share in it beside sessions."""
