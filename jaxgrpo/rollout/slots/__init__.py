"""The engine that decodes here: samples side by side in slots, prompts once per group in rows."""
