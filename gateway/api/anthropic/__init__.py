"""Anthropic's Messages API: `/v1/messages`, and models in its form."""
