"""Who may ask: API keys, and whom they stand for."""
