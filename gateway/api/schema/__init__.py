"""From a JSON body to a typed request. Only this package and each API's `schema` use pydantic."""
