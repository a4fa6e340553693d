"""Between text and token ids: tokenizer, detokenizer, chat templates, tool calls, conversations, files of prompts."""
