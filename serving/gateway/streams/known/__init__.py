"""Streamed chats of forms that vLLM has handled before, past vLLM from prompt to end."""
