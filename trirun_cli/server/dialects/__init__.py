"""The APIs of others than OpenAI's completions, over the same engine and the same chat templates."""
