"""Between text and token ids: tokenizer, detokenizer, chat templates, conversations, files of prompts."""
