"""The gateway: vLLM's OpenAI frontend over a fleet of engines."""
