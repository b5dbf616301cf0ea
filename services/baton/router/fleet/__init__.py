"""The workers of one ring: their streams, their reports and their health."""
