"""Models asked over HTTP, in the words of OpenAI's and vLLM's interfaces."""
