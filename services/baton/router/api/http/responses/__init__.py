"""OpenAI's responses: another shape of chats. No response is stored."""
