"""Reads vLLM's source, never runs it, and says what a release breaks for a plugin."""
