"""Between text and token ids: tokenizer, chat templates, incremental detokenising and stop strings.

Used where tokens become text, in the router and in the offline ``LLM``; the engine sees token ids only.
"""
