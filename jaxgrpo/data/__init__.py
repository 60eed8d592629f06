"""Where prompts come from: files, the hub, chat templates, built-in tasks."""
