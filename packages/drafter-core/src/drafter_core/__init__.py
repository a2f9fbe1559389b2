"""SuffixDecoding drafts from generated tokens; knows nothing of vLLM."""
