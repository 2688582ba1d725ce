"""Finds where a model's weights come from, how an engine reads them, and their revision."""
