"""Tokens in, tokens out; the memory agent on top of it."""
