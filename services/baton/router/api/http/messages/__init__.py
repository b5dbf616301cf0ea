"""Anthropic's messages: another shape of chats."""
