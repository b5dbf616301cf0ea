"""OpenAI's responses: another shape of chats. Nothing is stored."""
