"""How a body becomes a typed request. Pydantic is used here, and in each API's `schema`, alone."""
