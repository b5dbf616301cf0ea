"""OpenAI's protocol: completions, chats and tokens."""
