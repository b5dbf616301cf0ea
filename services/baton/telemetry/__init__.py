"""Metrics, and how they are served. A metric is named once: here, or at the field that it exports."""
