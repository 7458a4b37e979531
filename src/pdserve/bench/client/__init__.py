"""Sends requests to any server that speaks the OpenAI API, and notes when each token came."""
