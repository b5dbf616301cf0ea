"""API keys, the clients they identify, and cache salts."""
