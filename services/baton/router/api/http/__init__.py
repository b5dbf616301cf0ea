"""OpenAI's HTTP API over the completion core."""
