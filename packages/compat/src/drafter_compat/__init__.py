"""What a plugin relies on in vLLM, and how it changes it; knows nothing of drafting."""
